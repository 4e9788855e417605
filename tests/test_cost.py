"""The cost table against torch: parameters of the real models, FLOPs of the matrix products that they run on a CPU.

`FlopCounterMode` counts mm, addmm and bmm. It does not count:
- products with a vector (mv), which the pulse has; a mapping adds them here;
- torch's fused softmax attention on a CPU; the mathematical version is taken here, which is two bmm;
- Triton kernels; the reference path runs here;
- anything elementwise, such as rotations, norms, gates and biases: the column "other" of the table.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from trope.bench.cost import Row, cost_table
from trope.cli.main import app
from trope.config import PRESETS, Config
from trope.evaluate.live import live_scores
from trope.evaluate.ranking import dot_scores
from trope.experiments.variants import NAMED, configure
from trope.kernels.backend import prefer
from trope.models import cost
from trope.models.blocks import BLOCKS
from trope.models.cost import Part, model_cost, total
from trope.models.pulse import own_items
from trope.models.recommender import SequentialRecommender
from trope.train.loss import token_losses

MODELS = (*PRESETS, *NAMED)
SPAN = (1_500_000_000, 1_600_000_000)
# Sizes without a common factor, so that no two of them can be mistaken for each other.
B, L, V = 3, 7, 211
SIZE = ("model.width=12", "model.heads=2", "model.head_dim=6", "model.max_len=11", "model.blocks=3")
TRAIN = ("train.negatives=5",)
ATEN = torch.ops.aten
VARIANTS = (
    ("hstu-trope", "model.head_dim=10", "model.heads=3"),  # heads that do not fill the width
    ("hstu-trope", "model.position_bias=false"),
    ("hstu", "model.position_bias=false"),
    ("hstu-trope", "rotary.bank=calendar", "rotary.readout=1"),
    ("hstu-trope", "rotary.share_alpha=true", "rotary.rotate_key=false"),
    ("hstu-trope", "rotary.rotate_query=false"),
    ("hstu-trope", "rotary.learnable=false"),
    ("hstu-torope", "rotary.learnable=false"),
    ("sasrec", "rotary.kind=index", "rotary.readout=auto"),
    ("tisasrec", "rotary.readout=0.01", "model.pulse=true"),
    ("transformer", "model.width=34", "model.head_dim=17"),
)


def config_of(model: str, *settings: str) -> Config:
    return configure(model, [*SIZE, *TRAIN, *settings])


def costs(config: Config) -> dict[str, Part]:
    return {part.name: part for part in model_cost(config, V, B, L)}


def make_model(config: Config) -> SequentialRecommender:
    torch.manual_seed(0)
    return SequentialRecommender(config, V, SPAN).eval()


def histories() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Full histories of different items, asked about at one moment."""
    items_BL = torch.stack([torch.randperm(V)[:L] + 1 for _ in range(B)])
    times_BL = torch.randint(*SPAN, (B, L)).sort(dim=1).values
    return items_BL, times_BL, torch.full((B,), L), torch.full((B,), SPAN[1])


def products_with_a_vector(matrix: Sequence[int], vector: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * matrix[0] * matrix[1]


def counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping={ATEN.mv: products_with_a_vector})


def encode(model: SequentialRecommender) -> tuple[Tensor, dict[Any, int]]:
    """The outputs, and FLOPs by torch operator."""
    with torch.no_grad(), prefer("torch"), sdpa_kernel(SDPBackend.MATH), counter() as counted:
        out_BLE = model.encode(*histories())
    return out_BLE, counted.get_flop_counts()["Global"]


@pytest.mark.parametrize("model", MODELS)
def test_parameters_of_every_model_at_its_own_size(model: str) -> None:
    config = configure(model, [])
    with torch.device("meta"):
        real = SequentialRecommender(config, 100_541, SPAN)
    parts = model_cost(config, 100_541, 128, 50)
    assert total(parts).parameters == sum(p.numel() for p in real.parameters())


@pytest.mark.parametrize("variant", [(model,) for model in MODELS] + list(VARIANTS), ids=" ".join)
def test_parameters_of_each_part(variant: tuple[str, ...]) -> None:
    config = config_of(*variant)
    real, parts = make_model(config), costs(config)
    assert total(parts.values()).parameters == sum(p.numel() for p in real.parameters())
    named = {"items": "item table", "positions": "positions", "readout": "readout"}
    for child, name in named.items():
        module = getattr(real, child)
        found = 0 if module is None else sum(p.numel() for p in module.parameters())
        assert found == (parts[name].parameters if name in parts else 0)
    rotary = sum(p.numel() for name, p in real.blocks.named_parameters() if ".rotary." in name)
    assert rotary == (parts["rotary encoding"].parameters if "rotary encoding" in parts else 0)
    held = 0 if real.pulse is None else sum(b.numel() for b in real.pulse.buffers())
    assert held == total(parts.values()).held


@pytest.mark.parametrize("variant", [(model,) for model in MODELS] + list(VARIANTS), ids=" ".join)
def test_products_of_a_forward(variant: tuple[str, ...]) -> None:
    config = config_of(*variant)
    _, counted = encode(make_model(config))
    parts = costs(config)
    batched = sum(
        parts[name].products for name in ("attention scores", "attention values", "intervals") if name in parts
    )
    linear = sum(parts[name].products for name in ("projections", "feed-forward") if name in parts)
    assert counted.get(ATEN.bmm, 0) == batched
    assert counted.get(ATEN.mm, 0) + counted.get(ATEN.addmm, 0) == linear
    assert sum(counted.values()) == total(parts.values(), "network").products == batched + linear


@pytest.mark.parametrize("model", ["sasrec", "tisasrec", "transformer"])
def test_products_of_a_transformers_modules(model: str) -> None:
    config = config_of(model)
    real = make_model(config)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter() as counted:
        real.encode(*histories())
    # All blocks are one name to the counter.
    of = {name: sum(by.values()) for name, by in counted.get_flop_counts().items()}
    parts, block = costs(config), BLOCKS[model].__name__
    assert parts["feed-forward"].products == of[f"{block}.feed_forward"]
    assert parts["projections"].products == of[f"{block}.attention.qkv"] + of[f"{block}.attention.out"]


@pytest.mark.parametrize("model", ["trope", "hstu-trope"])
def test_products_of_a_request(model: str) -> None:
    """Scores of the catalogue, with the pulse where there is one."""
    config = config_of(model)
    real, parts = make_model(config), costs(config)
    items_BL, times_BL, lengths_B, t_now_B = histories()
    last_BE = encode(real)[0][:, -1]
    items_VE = real.item_vectors().detach()
    with torch.no_grad(), counter() as counted:
        if real.pulse is None:
            dot_scores(last_BE, items_VE)(1, V + 1)
        else:
            offsets = torch.arange(B + 1) * L
            own = own_items(items_BL.flatten(), times_BL.flatten(), offsets, t_now_B, real.pulse.half_lives, V)
            scaled_BE = real.pulse.scale(last_BE, lengths_B, t_now_B)
            real.pulse.get_buffer("counted_until").fill_(int(t_now_B.min()) - 1)
            live = real.pulse.kept()

            def shares(moments: Tensor) -> list[Tensor]:
                return [live.log_shares(t) for t in moments.tolist()]

            live_scores(real.pulse, scaled_BE, items_VE, own, t_now_B, shares)(1, V + 1)
    assert counted.get_total_flops() == total(parts.values(), "request").products
    has_pulse = real.pulse is not None
    assert bool(counted.get_flop_counts()["Global"].get(ATEN.mv)) == has_pulse == ("pulse: counts" in parts)


@pytest.mark.parametrize("settings", [(), ("train.loss=full",), ("train.shared_negatives=true",)])
def test_products_of_the_loss(settings: tuple[str, ...]) -> None:
    config = config_of("hstu-time", *settings)
    real = make_model(config)
    out_TE = encode(real)[0].flatten(0, 1)
    targets_T = torch.randint(1, V + 1, (B * L,))
    shape = (5,) if config.train.shared_negatives else (B * L, 5)
    negatives = None if config.train.loss == "full" else torch.randint(1, V + 1, shape)
    with torch.no_grad(), counter() as counted:
        token_losses(out_TE, targets_T, real.item_vectors(), negatives, 0.05)
    assert counted.get_total_flops() == costs(config)["scores of the loss"].products


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_papers_count_of_t_rope(blocks: int) -> None:
    """Appendix "Parameter and FLOP overhead": M D parameters; 4 N P for the angles and 12 N H P for the rotations."""
    config = configure("hstu-trope-attention", [f"model.blocks={blocks}"])
    N, H, D = 128 * 50, 4, 128
    (part,) = (part for part in model_cost(config, 100_541, 128, 50) if part.name == "rotary encoding")
    assert part.parameters == blocks * D
    assert part.other == blocks * (4 * N * D // 2 + 12 * N * H * D // 2)
    assert part.products == 0


def test_t_rope_adds_nothing_that_the_counter_sees() -> None:
    assert encode(make_model(config_of("sasrec")))[1] == encode(make_model(config_of("sasrec-trope")))[1]


def test_every_block_has_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(cost._BLOCKS) == set(BLOCKS)
    monkeypatch.delitem(cost._BLOCKS, "hstu")
    with pytest.raises(ValueError, match="the cost of block 'hstu' is not known; it is known for sasrec, "):
        model_cost(config_of("hstu"), V, B, L)


@pytest.mark.parametrize("wrong", [(0, B, L), (V, 0, L), (V, B, 0), (V, B, 12)])
def test_sizes_that_cannot_be_are_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"length between 1 and model\.max_len = 11, got"):
        model_cost(config_of("hstu"), *wrong)


def test_the_table_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("trope")
    rows = cost_table({"trope": config}, V, B, L, tmp_path / "cost.csv")
    said = capsys.readouterr().out
    assert "trope: 3 histories of 7 events, 211 items" in said
    assert f"{total(costs(config).values()).parameters:,}" in said
    with (tmp_path / "cost.csv").open() as file:
        written = list(csv.DictReader(file))
    assert list(written[0]) == [field.name for field in dataclasses.fields(Row)]
    assert [int(row["products"]) for row in written] == [row.products for row in rows]
    assert sum(row.parameters for row in rows) == total(costs(config).values()).parameters


def test_the_command_takes_models_and_config_files(tmp_path: Path) -> None:
    run = CliRunner().invoke
    both = run(app, ["bench", "cost", "--model", "hstu", "--model", "sasrec", "--items", "1000", "--length", "20"])
    assert both.exit_code == 0, both.output
    assert "hstu: 128 histories of 20 events, 1,000 items" in both.output and "sasrec: 128" in both.output
    file = tmp_path / "own.toml"
    file.write_text('[model]\nblock = "hstu"\nwidth = 32\n[train]\nbatch = 9\n')
    own = run(app, ["bench", "cost", "--config", str(file), "--csv", str(tmp_path / "own.csv")])
    assert own.exit_code == 0, own.output
    with (tmp_path / "own.csv").open() as written:
        first = next(csv.DictReader(written))
    assert (first["batch"], first["items"], first["parameters"]) == ("9", "100541", str(100_542 * 32))
