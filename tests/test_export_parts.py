"""The parts of an export that need no exporter: buckets, intervals, phases, programs as modules, made-up users."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trope.config import PRESETS
from trope.kernels.attention.reference import time_buckets
from trope.models.context import relative_intervals
from trope.models.hstu import LAST_BUCKET
from trope.models.recommender import SequentialRecommender
from trope.serve.export.contexts import bucket_edges, exact_buckets, exact_intervals
from trope.serve.export.exported import ExportedNetwork
from trope.serve.export.programs import programs_of
from trope.settings import preset
from trope.times import DAY

SPAN = (1_500_000_000, 1_560_000_000)
ITEMS, MAX_LEN = 60, 6
SIZE = ["model.width=16", "model.heads=2", "model.head_dim=8", f"model.max_len={MAX_LEN}"]
ROTARY = [
    "rotary.bank=calendar", "rotary.phase=fp32", "rotary.conditioning=paper", "rotary.shifted=false",
    "rotary.rotate_query=false", "rotary.rotate_key=false", "rotary.position=index", "rotary.kind=index",
    "rotary.kind=torope", "rotary.learnable=false", "rotary.share_alpha=true",
]  # fmt: skip


@cache
def model_of(name: str, *more: str) -> SequentialRecommender:
    """With biases and frequencies that matter."""
    torch.manual_seed(0)
    model = SequentialRecommender(preset(name, [*SIZE, *more]), ITEMS, SPAN).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "bias.position" in path or "bias.time" in path or "delta" in path:
                parameter.normal_()
    return model


@cache
def network_of(name: str, *more: str) -> ExportedNetwork:
    """The programs as they are before any export."""
    model = model_of(name, *more)
    return ExportedNetwork(programs_of(model), model.items.weight.detach(), model.config, SPAN, None)


def histories(seed: int, users: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded histories with ties; padding has times that must not matter."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, MAX_LEN + 1, (users,), generator=draw)
    items = torch.randint(1, ITEMS + 1, (users, MAX_LEN), generator=draw)
    times = SPAN[0] + DAY * torch.randint(0, 3, (users, MAX_LEN), generator=draw).cumsum(1)
    padding = torch.arange(MAX_LEN) >= lengths[:, None]
    return items.masked_fill(padding, 0), times.masked_fill(padding, 12345), lengths


def check(name: str, *more: str) -> None:
    model, network = model_of(name, *more), network_of(name, *more)
    for seed in range(3):
        history = histories(seed)
        moments = SPAN[1] + DAY * torch.tensor([[0, 9, 30_000]]).expand(5, 3) + torch.arange(5)[:, None]
        with torch.no_grad():
            wanted = torch.stack([model.encode_last(*history, moment) for moment in moments.T], dim=1)
            got = torch.stack([network.encode_last(*history, moment) for moment in moments.T], dim=1)
            assert torch.allclose(got, wanted, rtol=0, atol=5e-7)
            if network.can_remember:
                assert torch.allclose(network.remember(*history).look(moments), wanted, rtol=0, atol=5e-7)


@pytest.mark.parametrize("predicts", ["next-event", "next-moment"])
@pytest.mark.parametrize("name", list(PRESETS))
def test_programs_give_what_encode_last_gives(name: str, predicts: str) -> None:
    check(name, f"model.predicts={predicts}")


@pytest.mark.parametrize("setting", ROTARY)
def test_programs_know_every_encoding(setting: str) -> None:
    check("hstu-trope", setting)


def test_a_history_of_one_event_is_padded() -> None:
    model, network = model_of("hstu-trope"), network_of("hstu-trope")
    one = torch.tensor([[3]]), torch.tensor([[SPAN[0]]]), torch.tensor([1])
    now = torch.tensor([SPAN[1]])
    assert torch.allclose(network.encode_last(*one, now), model.encode_last(*one, now), rtol=0, atol=5e-7)


def test_freezing_leaves_the_model_as_it_is() -> None:
    model = model_of("trope")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    programs_of(model)
    assert set(before) == set(model.state_dict())
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_windows_of_one_event_are_refused() -> None:
    torch.manual_seed(0)
    config = preset("sasrec", [*SIZE[:3], "model.max_len=1"])
    with pytest.raises(ValueError, match="max_len of at least 2"):
        programs_of(SequentialRecommender(config, ITEMS, SPAN))


def test_buckets_are_the_models_at_every_edge() -> None:
    edges = bucket_edges(LAST_BUCKET)
    near = (edges[:100, None] + torch.arange(-3, 4)).flatten()  # the hundredth edge is 300,000 years
    gaps = torch.cat((near[near >= 0], torch.arange(2_000), torch.tensor([2_501_482_627, 9_000_000_000])))
    zero = torch.zeros(1, 1, dtype=torch.int64)
    assert torch.equal(exact_buckets(gaps[None], zero, edges), time_buckets(gaps[None], zero, LAST_BUCKET))
    assert torch.equal(exact_buckets(zero, gaps[None], edges), time_buckets(zero, gaps[None], LAST_BUCKET))


@given(
    st.lists(st.lists(st.sampled_from([0, 1, 2, 3, 5, 10, 15, 600, DAY, 10**9]), min_size=5, max_size=5), min_size=1)
)
def test_intervals_are_the_models(gaps: list[list[int]]) -> None:
    times = SPAN[0] + torch.tensor(gaps).cumsum(1)
    assert torch.equal(exact_intervals(times, 256), relative_intervals(times, 256))


def test_pending_places_are_the_last_tie() -> None:
    from trope.serve.export.exported import pending_places

    times = torch.tensor([[1, 2, 2, 2, 9], [1, 1, 7, 7, 7], [4, 4, 4, 4, 4]])
    assert pending_places(times, torch.tensor([4, 3, 2])).tolist() == [[1, 2, 3], [2, 2, 2], [0, 1, 1]]


def test_made_up_users_reach_the_ends() -> None:
    from trope.serve.export.parity import Parity, made_up

    class Of:
        model = model_of("hstu-trope")

    histories, moments = made_up(Of(), 400, 0)  # type: ignore[arg-type]
    lengths = np.diff(histories.offsets)
    assert lengths.min() == 1 and lengths.max() > MAX_LEN
    last = histories.times[histories.offsets[1:] - 1]
    assert (moments >= last).all() and (moments == last).any() and moments.max() > 4_000_000_000
    assert histories.items.min() == 1 and histories.items.max() <= ITEMS
    ties = np.diff(histories.times) == 0
    assert ties.mean() > 0.1
    assert not Parity(1, float("nan"), 0.0, 1.0, 1.0).holds and not Parity(1, 0.0, float("nan"), 1.0, 1.0).holds


def test_compiled_programs_get_contiguous_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code reads by shape alone: a transposed view would be read in the wrong order."""
    from trope.serve.export import formats

    class Package:
        loader: ClassVar[Any]

        def boxed_run(self, inputs: list[Tensor]) -> list[Tensor]:
            assert all(x.is_contiguous() for x in inputs)
            return [inputs[0] + 1]

    Package.loader = Package()
    monkeypatch.setattr("torch._inductor.aoti_load_package", lambda path: Package())
    view = torch.arange(6).view(2, 3).T
    assert torch.equal(formats.load(tmp_path / "encode.pt2", "aoti")(view, view), view + 1)


@pytest.mark.parametrize(("width", "is_packed"), [(16, False), (512, True)])
def test_wide_weights_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, is_packed: bool) -> None:
    from trope.serve.export import formats

    def compile_(graph: object, package_path: str, inductor_configs: dict[str, object]) -> None:
        assert inductor_configs["freezing"] is is_packed
        assert not torch.is_grad_enabled()  # or Inductor would not freeze
        (tmp_path / "asked").touch()

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", compile_)
    monkeypatch.setattr(formats, "trace", lambda program: None)
    model = model_of("sasrec", f"model.width={width}", f"model.head_dim={width // 2}", "model.blocks=1")
    formats.write(programs_of(model)["encode"], "aoti", tmp_path / "encode.pt2")
    assert (tmp_path / "asked").exists()
