"""`remember`, `look` and `append`: what `encode_last` gives, for many moments from one encode.

Each case runs twice. A float32 model as training begins must agree to 1e-6: the two ways add up in another order. A
float64 model with large biases, projections and frequencies must agree to 2e-7, three roundings of its float32 output:
there every part of the attention counts, and a wrong key, time or bias is far larger than rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Self

import numpy as np
import pytest
import torch
from conftest import on_gpu
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from trope import config as configs
from trope.config import PRESETS, BlockRules, Config
from trope.models import blocks
from trope.models import memory as memory_module
from trope.models.block import Block
from trope.models.context import Context, Stream
from trope.models.memory import Memory
from trope.models.recommender import SequentialRecommender
from trope.settings import preset, with_settings

SPAN, DAY = (1_500_000_000, 1_560_000_000), 86_400
ITEMS, MAX_LEN = 150, 6
SIZE = ["model.width=16", "model.heads=2", "model.head_dim=8", f"model.max_len={MAX_LEN}"]
REMEMBERING = [name for name in PRESETS if name != "tisasrec"]
PREDICTS = ["next-event", "next-moment"]
# An event: its item, and days since the event before; 0 ties them.
EVENT = st.tuples(st.integers(1, ITEMS), st.sampled_from([0, 0, 1, 40]))
HISTORY = st.lists(EVENT, min_size=1, max_size=MAX_LEN + 2)
Events = list[tuple[int, int]]


@cache
def model_of(name: str, predicts: str = "next-event", *more: str) -> SequentialRecommender:
    torch.manual_seed(0)
    return SequentialRecommender(preset(name, [*SIZE, f"model.predicts={predicts}", *more]), ITEMS, SPAN).eval()


@cache
def strong(name: str, predicts: str = "next-event", *more: str) -> SequentialRecommender:
    """In float64, with biases, projections and frequencies far from where training begins."""
    torch.manual_seed(0)
    config = preset(name, [*SIZE, f"model.predicts={predicts}", *more])
    model = SequentialRecommender(config, ITEMS, SPAN).double().eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "bias.position" in path or "bias.time" in path or "delta" in path:
                parameter.normal_()
            elif "uvqk" in path:
                parameter.mul_(10)
    return model


def history_of(events: Events) -> tuple[list[int], list[int]]:
    """Items and times; the events before the last tie may be tied themselves."""
    times = SPAN[0] + 100 * DAY + DAY * np.cumsum([gap for _, gap in events])
    return [item for item, _ in events], times.tolist()


def padded(histories: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """The last MAX_LEN events of each, as `encode` takes them; padding has times that must not matter."""
    lengths = torch.tensor([min(MAX_LEN, len(items)) for items, _ in histories])
    items_BL = torch.zeros(len(histories), int(lengths.max()), dtype=torch.int64)
    times_BL = torch.full_like(items_BL, 12345)
    for row, (items, times) in enumerate(histories):
        items_BL[row, : lengths[row]] = torch.tensor(items[-MAX_LEN:])
        times_BL[row, : lengths[row]] = torch.tensor(times[-MAX_LEN:])
    return items_BL, times_BL, lengths


def moments_of(histories: Sequence[tuple[list[int], list[int]]], days: Sequence[int]) -> Tensor:
    """Moments [B, M], so many days after each history's last event."""
    return torch.tensor([[times[-1] + DAY * day for day in days] for _, times in histories])


def check_scores(model: SequentialRecommender, got_BME: Tensor, batch: Sequence[Tensor], moments_BM: Tensor) -> None:
    """Scores of all items to 1e-6, and the same top 100; items may change places only where their scores are equal."""
    items_VE = model.item_vectors().detach()[1:]
    tolerance = 1e-6 if model.items.weight.dtype == torch.float32 else 2e-7
    with torch.no_grad():
        wanted_BME = torch.stack([model.encode_last(*batch, moment) for moment in moments_BM.T], dim=1)  # type: ignore[call-arg]
    wanted, got = wanted_BME @ items_VE.T, got_BME @ items_VE.T
    assert got_BME.dtype == torch.float32
    assert float((wanted - got).abs().max()) <= tolerance
    best, found = wanted.topk(100), got.topk(100)
    by_place = wanted.gather(2, found.indices)
    assert float((best.values - by_place).abs().max()) <= 2 * tolerance


@pytest.mark.parametrize("predicts", PREDICTS)
@pytest.mark.parametrize("name", REMEMBERING)
@settings(max_examples=8)
@given(
    begins=st.lists(HISTORY, min_size=1, max_size=3),
    appended=st.lists(st.lists(EVENT, min_size=3, max_size=3), max_size=8),
    days=st.lists(st.integers(0, 400), min_size=1, max_size=3),
)
@example(begins=[[(1, 0)]], appended=[[(i, 1)] * 3 for i in (2, 3, 4)], days=[0, 7])  # from one event, one by one
@example(begins=[[(1, 0), (2, 0), (3, 0)], [(4, 1)]], appended=[[(5, 0)] * 3, [(6, 1)] * 3], days=[3])  # one basket
@example(begins=[[(i + 1, 1) for i in range(8)]], appended=[[(9, 0)] * 3, [(9, 2)] * 3], days=[1])  # the window shifts
def test_any_order_of_appends_gives_what_encode_last_gives(
    name: str, predicts: str, begins: list[Events], appended: list[list[tuple[int, int]]], days: list[int]
) -> None:
    for model in (model_of(name, predicts), strong(name, predicts)):
        check_appends(model, [history_of(events) for events in begins], appended, days)


def check_appends(
    model: SequentialRecommender,
    histories: list[tuple[list[int], list[int]]],
    appended: list[list[tuple[int, int]]],
    days: list[int],
) -> None:
    batch, moments = padded(histories), moments_of(histories, days)
    memory = model.remember(*batch)
    check_scores(model, model.look(memory, moments), batch, moments)
    for events in appended:
        new = events[: len(histories)]
        for (items, times), (item, gap) in zip(histories, new, strict=True):
            items.append(item)
            times.append(times[-1] + DAY * gap)
        memory.append(torch.tensor([x[-1] for x, _ in histories]), torch.tensor([x[-1] for _, x in histories]))
        batch, moments = padded(histories), moments_of(histories, days)
        check_scores(model, model.look(memory, moments), batch, moments)
    assert [row[:n].tolist() for row, n in zip(*memory.events[1:], strict=True)] == [x[-MAX_LEN:] for _, x in histories]


@pytest.mark.parametrize("settings_of", [
    ("rotary.bank=calendar",), ("rotary.phase=fp32",), ("rotary.conditioning=paper",), ("rotary.shifted=false",),
    ("rotary.rotate_query=false",), ("rotary.rotate_key=false",), ("rotary.position=index",), ("rotary.kind=index",),
    ("rotary.kind=none",), ("rotary.conjugate=false",), ("rotary.share_alpha=true",), ("rotary.learnable=false",),
    ("rotary.readout=0",), ("rotary.readout=1.0",), ("model.position_bias=false",), ("model.time_bias=false",),
    ("model.position_bias=false", "model.time_bias=false"), ("model.gate_floor=none",), ("model.blocks=1",),
    ("model.blocks=3",),
])  # fmt: skip
@pytest.mark.parametrize("predicts", PREDICTS)
def test_every_setting_of_hstu(predicts: str, settings_of: tuple[str, ...]) -> None:
    appended = [[(11, 0), (11, 1)], [(12, 2), (12, 0)], [(13, 0), (13, 0)], [(14, 5), (14, 0)]]
    for model in (model_of("hstu-trope", predicts, *settings_of), strong("hstu-trope", predicts, *settings_of)):
        histories = [history_of([(3, 1), (7, 1), (3, 0), (9, 0)]), history_of([(2, 1), (5, 30)])]
        check_appends(model, histories, appended, [0, 1, 33, 365])


@pytest.mark.parametrize(
    ("name", "knows"), [("hstu-trope", True), ("sasrec-trope", True), ("sasrec", False), ("hstu", False)]
)
def test_only_models_that_know_the_moment_tell_moments_apart(name: str, knows: bool) -> None:
    model = model_of(name)
    out_BME = model.look(model.remember(*padded([history_of([(1, 1), (2, 3)])])), SPAN[1] + DAY * torch.arange(1, 9))
    assert bool(torch.allclose(out_BME[:, :1].expand_as(out_BME), out_BME, atol=1e-6)) != knows


def test_the_readout_alone_tells_moments_apart() -> None:
    model = model_of("hstu", "next-event", "rotary.readout=0.5")
    history = [history_of([(1, 1), (2, 3)])]
    moments = SPAN[0] + 300 * DAY + DAY * torch.arange(3)
    out_BME = model.look(model.remember(*padded(history)), moments)
    assert float((out_BME[:, 0] - out_BME[:, 1]).abs().max()) > 1e-3
    check_scores(model, out_BME, padded(history), moments.expand(1, -1))


@pytest.mark.parametrize("predicts", PREDICTS)
def test_a_moment_may_lie_before_the_last_event(predicts: str) -> None:
    model, history = model_of("hstu-trope", predicts), [history_of([(1, 1), (2, 30), (3, 0)])]
    moments = moments_of(history, [-40, -1, 0])
    check_scores(model, model.look(model.remember(*padded(history)), moments), padded(history), moments)


def test_many_moments_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, histories = model_of("hstu-trope"), [history_of([(1, 1), (2, 3)]), history_of([(4, 1)])]
    memory, moments = model.remember(*padded(histories)), SPAN[1] + DAY * torch.arange(50)
    whole = model.look(memory, moments)
    parts: list[int] = []
    original = memory_module.look

    def counted(*args: object) -> Tensor:
        out: Tensor = original(*args)  # type: ignore[arg-type]
        parts.append(out.shape[1])
        return out

    monkeypatch.setattr(memory_module, "look", counted)
    monkeypatch.setitem(memory_module.MOST_NUMBERS, "cpu", 2 * 7 * 64)
    torch.testing.assert_close(model.look(memory, moments), whole, atol=1e-6, rtol=0)
    assert parts == [7] * 7 + [1]
    monkeypatch.setitem(memory_module.MOST_NUMBERS, "cpu", 1)
    torch.testing.assert_close(model.look(memory, moments[:2]), whole[:, :2], atol=1e-6, rtol=0)


@pytest.mark.parametrize("predicts", PREDICTS)
def test_joined_memories_go_on_as_one(predicts: str) -> None:
    model = model_of("hstu-trope", predicts)
    histories = [history_of([(1, 1), (2, 0)]), history_of([(i + 1, 1) for i in range(5)]), history_of([(9, 0)])]
    alone = [model.remember(*padded([history])) for history in histories]
    joined, moments = Memory.join(alone), moments_of(histories, [1, 9])
    assert len(joined) == 3
    check_scores(model, model.look(joined, moments), padded(histories), moments)
    asked = moments[:1].clone()
    before = model.look(alone[0], asked)
    for gap in (0, 2, 3):
        for items, times in histories:
            items.append(50 + gap)
            times.append(times[-1] + DAY * gap)
        joined.append(torch.full((3,), 50 + gap), torch.tensor([times[-1] for _, times in histories]))
        moments = moments_of(histories, [1, 9])
        check_scores(model, model.look(joined, moments), padded(histories), moments)
    assert torch.equal(model.look(alone[0], asked), before)  # the joined one is a copy
    with pytest.raises(ValueError, match="of the same model"):
        Memory.join([alone[0], model_of("hstu").remember(*padded(histories))])


def test_the_callers_tensors_are_copied_and_inference_mode_does_not_matter() -> None:
    model, histories = model_of("hstu-trope"), [history_of([(1, 1), (2, 3), (5, 1)])]
    items, times, lengths = batch = padded(histories)
    moments = moments_of(histories, [1, 9])
    with torch.inference_mode():
        memory = model.remember(items.clone(), times.clone(), lengths.clone())
        wanted = model.look(memory, moments)
    memory.append(torch.tensor([7]), times[:, -1] + DAY)  # outside of inference mode
    memory = model.remember(*batch)
    items.fill_(99), times.fill_(99), lengths.fill_(1)
    assert torch.equal(model.look(memory, moments), wanted)
    scores = wanted @ model.item_vectors().T  # an output of inference mode could not meet weights that have a gradient
    assert scores.requires_grad and not wanted.requires_grad


def test_memory_says_its_size() -> None:
    model = model_of("hstu-trope")
    memory = model.remember(*padded([history_of([(1, 1), (2, 3)])]))
    assert memory.num_bytes == 4 * 2 * 2 * 16 * MAX_LEN  # keys and values of two layers, no more than max_len places


class Opaque(Block):
    """A block that keeps no keys and values."""

    @classmethod
    def stack(cls, config: Config, time_span: tuple[int, int]) -> list[Self]:
        return [cls()]

    def forward(self, stream: Stream, context: Context) -> Stream:
        return stream


def test_a_block_that_cannot_remember_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(configs.BLOCKS, "opaque", BlockRules())
    monkeypatch.setitem(blocks.BLOCKS, "opaque", Opaque)
    opaque = with_settings(preset("transformer", SIZE), ["model.block=opaque"])
    batch = padded([history_of([(1, 1)])])
    for model in (SequentialRecommender(opaque, ITEMS, SPAN), model_of("tisasrec")):
        assert not model.can_remember
        with pytest.raises(ValueError, match=r"(Opaque|TiSASRecBlock) cannot remember: .* use encode_last"):
            model.eval().remember(*batch)
    assert model_of("hstu-trope").can_remember
    stream, context = Stream(torch.zeros(1, 16)), Context.__new__(Context)
    for call in ("remember", "keys_values"):
        with pytest.raises(ValueError, match="cannot remember"):
            getattr(Opaque(), call)(stream, context)


def test_bad_calls_are_refused_in_a_line() -> None:
    model = model_of("hstu-trope")
    items, times, lengths = padded([history_of([(1, 1), (2, 3)])])
    memory = model.remember(items, times, lengths)
    now = times[:, -1] + DAY
    with pytest.raises(ValueError, match="at most max_len = 6"):
        model.remember(items.repeat(1, 4), times.repeat(1, 4), lengths)
    with pytest.raises(ValueError, match="from 1 to L events"):
        model.remember(items, times, lengths * 0)
    with pytest.raises(ValueError, match="from 1 to L events"):
        model.remember(items[:0], times[:0], lengths[:0])
    with pytest.raises(ValueError, match=r"items and times \[B, L\]"):
        model.remember(items, times[:, :1], lengths)
    with pytest.raises(ValueError, match="int64 Unix seconds"):
        model.remember(items, times.float(), lengths)
    with pytest.raises(ValueError, match="int64 Unix seconds"):
        model.look(memory, now.float())
    with pytest.raises(ValueError, match="a row for each of 1 histories"):
        model.look(memory, now.expand(2, 3))
    with pytest.raises(ValueError, match="one item and one time for each of 1"):
        memory.append(items[0], now)
    training = SequentialRecommender(model.config, ITEMS, SPAN)
    with pytest.raises(ValueError, match=r"call model\.eval"):
        training.remember(items, times, lengths)
    memory = training.eval().remember(items, times, lengths)
    training.train()
    for call in (lambda: memory.look(now), lambda: memory.append(items[:, 0], now)):
        with pytest.raises(ValueError, match=r"call model\.eval"):
            call()


def remember_append_look(name: str, predicts: str, device: str) -> None:
    """Two histories, events appended past the window's end, three moments; by the kernels that run on `device`."""
    model = SequentialRecommender(model_of(name, predicts).config, ITEMS, SPAN).eval().to(device)
    model.load_state_dict(model_of(name, predicts).state_dict())
    histories = [history_of([(3, 1), (5, 0), (7, 40)]), history_of([(4, 1), (9, 1)])]
    with torch.no_grad():
        memory = model.remember(*(x.to(device) for x in padded(histories)))
        for item in range(11, 11 + MAX_LEN):
            for items, times in histories:
                items.append(item)
                times.append(times[-1] + 2 * DAY)
            latest = [times[-1] for _, times in histories]
            memory.append(torch.full((2,), item, device=device), torch.tensor(latest, device=device))
            moments = moments_of(histories, (0, 1, 300)).to(device)
            got_BME = model.look(memory, moments)
            batch = [x.to(device) for x in padded(histories)]
            wanted_BME = torch.stack([model.encode_last(*batch, moment) for moment in moments.T], dim=1)
            torch.testing.assert_close(got_BME, wanted_BME, rtol=0, atol=2e-6)


@pytest.mark.parametrize("predicts", PREDICTS)
@pytest.mark.parametrize("name", ["hstu-trope", "sasrec-trope", "transformer-trope"])
def test_with_the_kernels_of_a_gpu(name: str, predicts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: what is remembered goes through kernels too, with shapes that training never has."""
    for module in [module for path, module in sys.modules.items() if path.startswith("trope.")]:
        if hasattr(module, "resolve_backend"):
            monkeypatch.setattr(module, "resolve_backend", lambda backend, x: "triton")
    remember_append_look(name, predicts, "cpu")


@on_gpu
@pytest.mark.parametrize("predicts", PREDICTS)
@pytest.mark.parametrize("name", REMEMBERING)
def test_on_a_gpu(name: str, predicts: str) -> None:
    remember_append_look(name, predicts, "cuda")
