"""The six models (and SASRec with T-RoPE): causality, padding, definitions, learning, checkpoints."""

import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import draw_times

from trope.config import PRESETS, Config, ModelConfig
from trope.kernels.attention.reference import bias, time_buckets
from trope.kernels.norm import gate
from trope.kernels.sequence_bounds import SequenceBounds
from trope.models.context import Context, Stream, relative_intervals
from trope.models.hstu import HSTUBlock
from trope.models.recommender import SequentialRecommender
from trope.models.transformer import IntervalAttention, IntervalTables
from trope.runs import read_json, seal, write_json
from trope.settings import from_dict, preset, read_toml, to_dict, to_toml

SMALL = ["model.width=16", "model.heads=2", "model.head_dim=8", "model.max_len=12", "model.dropout=0.0"]
SPAN = (1_500_000_000, 1_600_000_000)
ITEMS = 40


def small(name: str, *settings: str, items: int = ITEMS) -> SequentialRecommender:
    torch.manual_seed(0)
    return SequentialRecommender(preset(name, [*SMALL, *settings]), items, SPAN)


def histories(rows: int, length: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(1, ITEMS + 1, (rows, length), generator=rng), draw_times((rows, length), rng)


@pytest.mark.parametrize("name", PRESETS)
def test_causal_except_for_the_time_of_the_next_event(name: str, rng: torch.Generator) -> None:
    """Position m is unchanged by anything after m but the time of event m + 1."""
    model = small(name).eval()
    items, times = histories(3, 9, rng)
    lengths = torch.tensor([9, 9, 9])
    before = model.encode(items, times, lengths)
    for m in range(8):
        other_items, other_times = items.clone(), times.clone()
        other_items[:, m + 1 :] = torch.randint(1, ITEMS + 1, (3, 8 - m), generator=rng)
        other_times[:, m + 2 :] += 86_400 * 400
        after = model.encode(other_items, other_times, lengths)
        assert torch.allclose(before[:, : m + 1], after[:, : m + 1], atol=1e-6)
        assert not torch.allclose(before[:, m + 1], after[:, m + 1], atol=1e-3)


@pytest.mark.parametrize(("name", "looks_ahead"), [
    ("sasrec", False), ("tisasrec", False), ("hstu", False), ("hstu-torope", True), ("hstu-time", True),
    ("hstu-trope", True), ("sasrec-trope", True), ("transformer", False), ("transformer-trope", True),
])  # fmt: skip
def test_who_sees_the_moment_of_the_request(name: str, looks_ahead: bool, rng: torch.Generator) -> None:
    """t_now changes the last position of the models that look from it (TO-RoPE through its time bias), and no other."""
    model = small(name).eval()
    items, times = histories(2, 6, rng)
    lengths = torch.tensor([4, 6])
    t_now = times[:, -1] + 3600
    first = model.encode(items, times, lengths, t_now)
    second = model.encode(items, times, lengths, t_now + 86_400 * 100)
    changed = ~torch.isclose(first, second, atol=1e-5).all(-1)
    for row, length in enumerate(lengths.tolist()):
        assert not changed[row, : length - 1].any()
        assert changed[row, length - 1].item() == looks_ahead


@pytest.mark.parametrize("name", PRESETS)
def test_padding_and_jagged_agree_with_each_history_alone(name: str, rng: torch.Generator) -> None:
    model = small(name).eval()
    rows = [histories(1, n, rng) for n in (5, 1, 9)]
    now = torch.tensor([1_700_000_000, 1_700_000_100, 1_700_000_200])
    alone = [model.encode(i, t, torch.tensor([i.shape[1]]), now[row : row + 1])[0] for row, (i, t) in enumerate(rows)]
    jagged = model.encode_jagged(
        torch.cat([i[0] for i, _ in rows]), torch.cat([t[0] for _, t in rows]), torch.tensor([0, 5, 6, 15]), now
    )
    assert torch.allclose(jagged, torch.cat(alone), atol=1e-6)
    items, times = torch.zeros(3, 11, dtype=torch.int64), torch.full((3, 11), 1_700_000_000)
    for row, (i, t) in enumerate(rows):
        items[row, : i.shape[1]], times[row, : i.shape[1]] = i[0], t[0]
    lengths = torch.tensor([5, 1, 9])
    padded = model.encode(items, times, lengths, now)
    for row, want in enumerate(alone):
        assert torch.allclose(padded[row, : len(want)], want, atol=1e-6)
    last = model.encode_last(items, times, lengths, now)
    assert torch.allclose(last, torch.stack([want[-1] for want in alone]), atol=1e-6)


@pytest.mark.parametrize("name", PRESETS)
def test_no_histories_have_no_outputs(name: str, rng: torch.Generator) -> None:
    model = small(name).eval()
    items, times = (x[:0] for x in histories(2, 6, rng))
    none = torch.zeros(0, dtype=torch.int64)
    assert model.encode(items, times, none, none).shape == (0, 6, model.config.model.width)


@pytest.mark.parametrize("name", PRESETS)
def test_every_model_overfits_a_toy_set(name: str, rng: torch.Generator) -> None:
    """50 users: at least 95 % of the training targets ranked first."""
    model = small(name, "model.width=32", "model.head_dim=16", items=200)
    items, times = torch.randint(1, 201, (50, 8), generator=rng), draw_times((50, 8), rng)
    lengths = torch.full((50,), 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(300):
        out = model.encode(items[:, :-1], times[:, :-1], lengths, times[:, -1])
        scores = out @ model.item_vectors()[1:].T / 0.05
        targets = items[:, 1:] - 1
        if step % 20 == 0 and (scores.argmax(-1) == targets).float().mean() >= 0.97:
            break
        optimizer.zero_grad()
        F.cross_entropy(scores.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    assert (scores.argmax(-1) == targets).float().mean() >= 0.95


def test_outputs_and_items_are_unit_vectors(rng: torch.Generator) -> None:
    model = small("hstu-trope").eval()
    items, times = histories(2, 6, rng)
    out = model.encode(items, times, torch.tensor([6, 6]))
    assert out.dtype == torch.float32
    assert torch.allclose(out.norm(dim=-1), torch.ones(2, 6), atol=1e-5)
    vectors = model.item_vectors()
    assert not vectors[0].any()
    assert torch.allclose(vectors[1:].norm(dim=-1), torch.ones(ITEMS), atol=1e-5)


def test_hstu_block_is_its_definition(rng: torch.Generator) -> None:
    """Norm, one projection, SiLU on all of it, u v q k, silu(q k^T + bias) / n, norm, times u, linear."""
    config = ModelConfig(width=6, heads=2, head_dim=3, max_len=5, dropout=0.0)
    torch.manual_seed(0)
    block = HSTUBlock(config, None, number=1)
    x = torch.randn(1, 4, 6, generator=rng)
    times = draw_times((1, 4), rng)
    buckets = time_buckets(times, times, 128)
    bounds = SequenceBounds.padded(torch.tensor([4]), 4)
    context = Context(bounds, times[0], times[0], torch.arange(4), like=x)
    got = block(Stream(x[0] / 2, x[0] / 2), context).sum()[None]
    h = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    u, v, q, k = (F.silu(h[0] @ block.uvqk)).split(6, dim=-1)
    y = torch.zeros(4, 6)
    for head in (slice(0, 3), slice(3, 6)):
        for i in range(4):
            for j in range(i + 1):
                bias = block.bias.position[4 + j - i] + block.bias.time[buckets[0, i, j]]
                y[i, head] += F.silu(q[i, head] @ k[j, head] + bias) / 5 * v[j, head]
    want = x[0] + block.out(F.layer_norm(y, (6,), eps=1e-6) * u)
    assert torch.allclose(got[0], want, atol=1e-5)


@pytest.mark.parametrize(("floor", "steepest"), [("none", 20.0), ("1.0", 1.0)])
def test_a_floor_takes_the_jump_out_of_a_change_of_sign(floor: str, steepest: float) -> None:
    """One key whose score goes through zero: LayerNorm of silu(s) v turns around, in a jump unless there is a floor."""
    block = HSTUBlock(preset("hstu-trope", [f"model.gate_floor={floor}", "model.max_len=50"]).model, None, 1)
    scores = torch.linspace(-0.5, 0.5, 1001)
    v = torch.tensor([1.0, -1.0])
    y = scores[:, None].sigmoid() * scores[:, None] * v / block.max_len
    slope = gate(y, torch.full_like(y, 20.0), eps=block.gate_eps)[:, 0].diff().abs().max() / 0.001 / 20
    assert steepest / 2.5 < slope < steepest


def test_time_buckets_by_hand() -> None:
    """bucket = clamp(int(ln(max(|dt|, 1)) / 0.301), 0, 128)."""
    t = 1_500_000_000
    gaps = [0, 1, 2, 60, 86_400, 31_536_000]
    got = time_buckets(torch.tensor([[t + g for g in gaps]]), torch.tensor([[t] * len(gaps)]), 128)[0, :, 0]
    assert got.tolist() == [int(math.log(max(g, 1)) / 0.301) for g in gaps]
    assert time_buckets(torch.tensor([[t]]), torch.tensor([[1]]), 5).item() == 5


def test_position_bias_is_by_distance() -> None:
    weights = torch.randn(9)
    b = bias(3, weights, None, None)
    assert b is not None and b.shape == (3, 3)
    assert all(b[i, j] == weights[4 + j - i] for i in range(3) for j in range(3))


def test_interval_attention_never_needs_the_big_tensor(rng: torch.Generator) -> None:
    """TiSASRec's formula written out with the [L, L, E] tensors that the block avoids."""
    config = ModelConfig(block="tisasrec", width=6, heads=2, head_dim=3, max_len=5, dropout=0.0,
                         position_bias=False, time_bias=False)  # fmt: skip
    torch.manual_seed(0)
    tables = IntervalTables(config, most=4)
    attention = IntervalAttention(config, tables)
    x, times = torch.randn(1, 5, 6, generator=rng), draw_times((1, 5), rng)
    index = relative_intervals(times, 4)
    bounds = SequenceBounds.padded(torch.tensor([5]), 5)
    got = attention(x[0], Context(bounds, times[0], times[0], torch.arange(5), like=x))
    q, k, v = (part.view(5, 2, 3) for part in attention.qkv(x)[0].chunk(3, dim=-1))
    r_k, r_v = (t[index[0]].view(5, 5, 2, 3) for t in (tables.interval_keys, tables.interval_values))
    p_k, p_v = (t.view(5, 2, 3) for t in (tables.position_keys, tables.position_values))
    scores = torch.einsum("ihd,ijhd->hij", q, k[None] + r_k + p_k[None]) / math.sqrt(3)
    weights = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    want = attention.out(torch.einsum("hij,ijhd->ihd", weights, v[None] + r_v + p_v[None]).reshape(5, 6))
    assert torch.allclose(got, want, atol=1e-6)


def test_relative_intervals_by_hand() -> None:
    """Smallest gap so far: none, none (a tie), 10, 5."""
    t = 1_500_000_000
    got = relative_intervals(torch.tensor([[t, t, t + 10, t + 15]]), 256)[0]
    assert got[2].tolist() == [1, 1, 0, 0]
    assert got[3].tolist() == [3, 3, 1, 0]
    assert got[0, 0] == got[1, 0] == 0
    assert relative_intervals(torch.tensor([[t]]), 256).tolist() == [[[0]]]


@pytest.mark.parametrize("name", PRESETS)
def test_checkpoint_round_trip(name: str, tmp_path: Path, rng: torch.Generator) -> None:
    model = small(name).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=rng))
    model.save_pretrained(tmp_path / "m")
    model.save_pretrained(tmp_path / "m")  # again: replaced, nothing left beside it
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    twin = SequentialRecommender.from_pretrained(tmp_path / "m").eval()
    items, times = histories(2, 6, rng)
    assert torch.equal(
        model.encode(items, times, torch.tensor([6, 6])), twin.encode(items, times, torch.tensor([6, 6]))
    )
    assert twin.config == model.config and twin.num_items == ITEMS and twin.time_span == SPAN


def test_a_malicious_pickle_stays_harmless(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    small("hstu").save_pretrained(tmp_path / "m")
    for name in ("pytorch_model.bin", "model.pt", "optimizer.pkl"):
        (tmp_path / "m" / name).write_bytes(pickle.dumps(Bomb()))
    SequentialRecommender.from_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="cannot read the weights"):
        SequentialRecommender.from_pretrained(tmp_path / "m")
    assert not (tmp_path / "exploded").exists()


def test_foreign_and_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no config.json"):
        SequentialRecommender.from_pretrained(tmp_path)
    small("hstu").save_pretrained(tmp_path / "m")
    small("hstu-time").save_pretrained(tmp_path / "other")
    weights, config = tmp_path / "m" / "model.safetensors", tmp_path / "m" / "config.json"
    whole, described = weights.read_bytes(), read_json(config, {}, "")
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot read the weights"):
        SequentialRecommender.from_pretrained(tmp_path / "m")
    weights.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"do not fit its config: blocks.0.bias.time"):
        SequentialRecommender.from_pretrained(tmp_path / "m")
    weights.write_bytes(whole)
    for change, message in (
        ({"format": "other"}, "is not of format"),
        ({"num_items": -1}, "num_items -1"),
        ({"time_span": [1]}, "time_span"),
        ({"config": {"model": {"width": "wide"}}}, "model.width must be a whole number, got 'wide'"),
        ({"config": {"model": {"depth": 3}}}, "model has no field 'depth'"),
    ):
        write_json(config, seal({**described, **change}))
        with pytest.raises(ValueError, match=message):
            SequentialRecommender.from_pretrained(tmp_path / "m")


def test_histories_longer_than_the_model_are_refused(rng: torch.Generator) -> None:
    items, times = histories(1, 13, rng)
    with pytest.raises(ValueError, match="at most max_len = 12 events, got 13"):
        small("hstu").encode(items, times, torch.tensor([13]))


def test_the_papers_size_has_the_papers_extra_parameters() -> None:
    """T-RoPE adds 256 numbers in all at 2 blocks of head dim 128; the readout has one for each of its 64 planes."""

    def count(name: str, *settings: str) -> int:
        return sum(p.numel() for p in SequentialRecommender(preset(name, settings), 10, SPAN).parameters())

    assert count("hstu-trope", "rotary.readout=0") - count("hstu-time") == 256
    assert count("hstu-trope") - count("hstu-time") == 256 + 64
    assert count("hstu-time") - count("hstu") == 2 * 129


def test_config_round_trip_and_settings(tmp_path: Path) -> None:
    config = preset("hstu-trope", ["train.epochs=3", "rotary.bank=calendar", "train.stride=7", "train.lr=1"])
    assert from_dict(to_dict(config)) == config
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert read_toml(tmp_path / "c.toml") == config
    assert preset("hstu-trope", ["train.stride=none"]) == PRESETS["hstu-trope"]


@pytest.mark.parametrize(("setting", "message"), [
    ("train.epochs=x", "train.epochs must be a whole number, got 'x'"),
    ("train.epochs=2.5", "a whole number"),
    ("epochs=2", r"a setting is group.field=value with a group of model, rotary, train, eval, got 'epochs=2'"),
    ("model.nope=1", "model has no field 'nope'; it has block, width"),
    ("model.block=lstm", "model.block must be one of hstu, sasrec, tisasrec, transformer, got 'lstm'"),
    ("rotary.shifted=1", "true or false, got '1'"),
    ("train.lr=0", "train.lr must lie between 1e-12 and 100, got 0"),
    ("train.lr=inf", "train.lr must lie between"),
    ("train.lr=nan", "train.lr must lie between"),
    ("train.stride=500", "train.stride must be at most model.max_len = 50"),
    ("train.negatives=100000000", "train.negatives must lie between 1 and 1e"),
    ("train.negatives=1000000", r"must stay below 2\^31"),
    ("rotary.stationary=2", "rotary.stationary was removed after b687b81"),
    ("rotary.beta_min=1e9", "rotary.beta_min was removed"),
    ("model.time_buckets=-1", "model.time_buckets was removed"),
    ("model.dropout=1", r"must lie in \[0, 1\)"),
    ("train.patience=-1", "train.patience must lie between 0 and 1e"),
    ("model.block=sasrec", "block sasrec has no relative attention bias"),
])  # fmt: skip
def test_bad_settings(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset("hstu-time", [setting])


def test_bad_configs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown model 'gru'; choose one of sasrec"):
        preset("gru")
    with pytest.raises(ValueError, match="needs heads \\* head_dim = width"):
        Config(replace(PRESETS["sasrec"].model, head_dim=3))
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ValueError, match="is not TOML"):
        read_toml(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_text("[models]\nwidth = 3\n")
    with pytest.raises(ValueError, match="unknown config group 'models'"):
        read_toml(tmp_path / "bad.toml")
