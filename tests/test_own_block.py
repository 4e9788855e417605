"""A block that only this file knows trains, evaluates, is saved, loaded and recommends; nothing in trope/ is edited."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training import SIZE, one_thread, tiny_data

from trope import Recommender
from trope import config as configs
from trope.config import BlockRules, Config, ModelConfig
from trope.evaluate.evaluation import evaluate
from trope.models import blocks
from trope.models.block import Block
from trope.models.context import Context, Stream
from trope.models.recommender import SequentialRecommender
from trope.serve.recommender import Histories
from trope.settings import with_settings
from trope.train.loop import train

__all__ = ["one_thread"]  # a fixture for every test in here


class DecayBlock(Block):
    """Adds to each event a mean of the earlier ones that fades with the time between them; learns how fast."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mix = nn.Linear(config.width, config.width)
        self.rate = nn.Parameter(torch.zeros(()))

    @classmethod
    def stack(cls, config: Config, time_span: tuple[int, int]) -> list[Self]:
        return [cls(config.model) for _ in range(config.model.blocks)]

    def forward(self, stream: Stream, context: Context) -> Stream:
        x_BLE = context.padded(stream.sum())
        looking_from_BL, times_BL = context.padded(context.query_times_T), context.padded(context.times_T)
        days_BLL = (looking_from_BL[:, :, None] - times_BL[:, None, :]).clamp(min=0) / 86_400
        weights = torch.exp(-self.rate.exp() * days_BLL.float()).tril()
        mean_BLE = weights @ x_BLE / weights.sum(-1, keepdim=True).clamp(min=1e-6)
        return Stream(stream.sum() + context.flat(self.mix(mean_BLE)))


@pytest.fixture
def decay(monkeypatch: pytest.MonkeyPatch) -> Config:
    """The config of a model with that block."""
    monkeypatch.setitem(configs.BLOCKS, "decay", BlockRules())
    monkeypatch.setitem(blocks.BLOCKS, "decay", DecayBlock)
    plain = Config(replace(ModelConfig(), block="decay", position_bias=False, time_bias=False))
    return with_settings(plain, [*SIZE, "train.lr=0.01", "train.epochs=6"])


@pytest.mark.parametrize("readout", ["0", "auto"])
def test_it_lives_from_training_to_answer(decay: Config, readout: str, tmp_path: Path) -> None:
    data, run = tiny_data(tmp_path / "shop"), tmp_path / "run"
    config = with_settings(decay, [f"rotary.readout={readout}"])
    summary = train(data, config, run, "cpu", progress=False)
    losses = [line for line in (run / "log.jsonl").read_text().splitlines() if "epoch_loss" in line]
    assert len(losses) == 6
    model = SequentialRecommender.from_pretrained(run / "best")
    assert isinstance(model.blocks[0], DecayBlock) and (model.readout is None) == (readout == "0")
    again = evaluate(model, data, "test", config.eval.filter_seen, config.model.max_len)
    assert again.metrics == summary["test"]
    users = slice(int(data.offsets[0]), int(data.offsets[1]))
    events = data.items[users].numpy().astype(np.int64), data.times[users].numpy()
    history = Histories(*events, np.array([0, len(events[0])]))
    answers = [
        Recommender.from_pretrained(run, device="cpu").rank(history, np.array([events[1][-1] + later]), k=5)
        for later in (60, 60 * 86_400)
    ]
    assert all(len(answer.items) == 5 for answer in answers)
    assert not np.array_equal(answers[0].scores, answers[1].scores)  # the block knows the moment


@pytest.mark.parametrize("jagged", [False, True])
def test_it_sees_padded_and_jagged_tokens_alike(decay: Config, jagged: bool) -> None:
    torch.manual_seed(0)
    model = SequentialRecommender(decay, 20, (1_500_000_000, 1_600_000_000)).eval()
    items, times = torch.randint(1, 21, (5,)), 1_500_000_000 + 86_400 * torch.arange(5)
    now = torch.tensor([1_600_000_000])
    alone = model.encode(items[None], times[None], torch.tensor([5]), now)[0]
    if jagged:
        got: Tensor = model.encode_jagged(
            torch.cat((items, items)), torch.cat((times, times)), torch.tensor([0, 5, 10]), now.expand(2)
        )[5:]
    else:
        pad = torch.zeros(2, dtype=torch.int64)
        row = torch.cat((items, pad))[None], torch.cat((times, times[-1:].expand(2)))[None]
        got = model.encode(*row, torch.tensor([5]), now)[0, :5]
    torch.testing.assert_close(got, alone)
