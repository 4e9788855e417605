"""Evaluation against plain Python loops: the model's ranks, the filters, the baselines, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_logs import START, Event, loose, prepared, random_log, write_parquet
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from trope.cli.main import app
from trope.data.protocols import Protocol
from trope.data.sequences import EvalBatch, Sequences
from trope.evaluate import saved_ranks
from trope.evaluate.baselines import Events, MostPopular, RecentlyPopular, baselines, equal_baselines
from trope.evaluate.evaluation import evaluate, rank_users
from trope.evaluate.ranking import user_batches
from trope.kernels.ranking import Catalogue
from trope.models.recommender import SequentialRecommender
from trope.runs import DATA, write_json
from trope.settings import preset, to_toml
from trope.times import DAY

MAX_LEN = 6
PROTOCOLS = {
    "loo-strict": Protocol("loo-strict"),
    "holdout": Protocol("holdout", window=200_000),
    "next-basket": Protocol("next-basket"),
}
TINY = ("model.width=8", "model.heads=1", "model.head_dim=8", "model.blocks=1", f"model.max_len={MAX_LEN}")


class Toy(torch.nn.Module):
    """A stand-in whose scores are small whole numbers: they tie, and no order of summation changes them."""

    def __init__(self, num_items: int, width: int = 3) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.vectors = torch.randint(-1, 2, (num_items + 1, width), generator=random).float()
        self.vectors[0] = 100  # padding would win every ranking

    def encode_last(
        self, items_BL: torch.Tensor, times_BL: torch.Tensor, lengths_B: torch.Tensor, t_now_B: torch.Tensor
    ) -> torch.Tensor:
        assert not self.training
        last = items_BL[torch.arange(len(items_BL), device=items_BL.device), lengths_B - 1]
        return self.vectors[last] + (t_now_B % 3)[:, None]

    def item_vectors(self) -> torch.Tensor:
        return self.vectors


@pytest.fixture(params=["tiles", "kernel"])
def backend(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to rank. Without a GPU the kernel's reference stands in for it, which is quicker than interpreting."""
    return "torch" if request.param == "tiles" else by_kernel(device, monkeypatch)


@pytest.fixture
def kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    return by_kernel(device, monkeypatch)


def by_kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("trope.evaluate.evaluation.resolve_backend", lambda backend, x: "triton")
    return "triton" if device == "cuda" else "torch"


@pytest.fixture(scope="module", params=PROTOCOLS)
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    path = tmp_path_factory.mktemp("evaluate")
    # Coarse times, so that next-basket has baskets, with repeated items in them.
    rows = [(user, item, START + (time - START) // 50_000 * 50_000) for user, item, time in random_log(600)]
    return prepared(write_parquet(path / "log.parquet", rows), path / "out", loose(protocol=PROTOCOLS[request.param]))


def events(data: Sequences, user: int) -> list[tuple[int, int]]:
    span = slice(int(data.offsets[user]), int(data.offsets[user + 1]))
    return list(zip(data.items[span].tolist(), data.times[span].tolist(), strict=True))


def bounds(data: Sequences, split: str, user: int) -> tuple[int, int]:
    first, last = (data.train_end, data.valid_end) if split == "valid" else (data.test_start, data.test_end)
    return int(first[user]), int(last[user])


def naive_ranks(data: Sequences, split: str, score: Any, filter_seen: str) -> dict[int, list[float]]:
    """By the definition; score(user, t_now) gives item: score."""
    result = {}
    for user in range(data.num_users):
        own, (start, end) = events(data, user), bounds(data, split, user)
        if start == 0 or start == end:
            continue
        t_now = data.protocol.t_now(split) or own[start][1]
        positives = sorted({item for item, _ in own[start:end]})
        seen = {"none": [], "window": own[max(0, start - MAX_LEN) : start], "history": own[:start]}[filter_seen]
        scores = score(user, t_now)
        ranked = {item: s for item, s in scores.items() if item in positives or item not in {i for i, _ in seen}}
        result[user] = [
            1
            + sum(s > ranked[positive] for s in ranked.values())
            + sum(s == ranked[positive] for item, s in ranked.items() if item != positive) / 2
            for positive in positives
        ]
    return result


def assert_ranks(found: Any, expected: dict[int, list[float]]) -> None:
    assert found.users.tolist() == list(expected)
    assert found.offsets.tolist() == np.cumsum([0, *map(len, expected.values())]).tolist()
    assert found.ranks.tolist() == [rank for ranks in expected.values() for rank in ranks]


@pytest.mark.parametrize("split", ["valid", "test"])
@pytest.mark.parametrize("filter_seen", ["none", "window", "history"])
def test_a_models_ranks_equal_a_plain_loop(
    data: Sequences, split: str, filter_seen: Any, backend: Any, device: str
) -> None:
    model = Toy(data.num_items)

    def score(user: int, t_now: int) -> dict[int, float]:
        last = events(data, user)[bounds(data, split, user)[0] - 1][0]
        out = model.vectors[last] + t_now % 3
        return {item: float(model.vectors[item] @ out) for item in range(1, data.num_items + 1)}

    expected = naive_ranks(data, split, score, filter_seen)
    model.vectors = model.vectors.to(device)
    found = evaluate(model, data.to(device), split, filter_seen, MAX_LEN, backend=backend, batch=7)
    assert_ranks(found, expected)
    assert model.training  # left as it was
    assert found.metrics["HR@200"] == 1
    assert 0 < found.metrics["MRR"] < 1


@pytest.mark.parametrize("split", ["valid", "test"])
def test_baselines_equal_a_plain_loop(data: Sequences, split: str) -> None:
    items = range(1, data.num_items + 1)
    training = [item for user in range(data.num_users) for item, _ in events(data, user)[: int(data.train_end[user])]]
    known = [event for user in range(data.num_users) for event in events(data, user)[: bounds(data, split, user)[0]]]

    def popular(user: int, t_now: int) -> dict[int, float]:
        return {item: training.count(item) for item in items}

    def recent(user: int, t_now: int) -> dict[int, tuple[int, int]]:
        last = [item for item, time in known if t_now - hours * 3_600 <= time < t_now]
        return {item: (last.count(item), training.count(item)) for item in items}

    found = rank_users(MostPopular(data), data, split, "history", MAX_LEN, batch=7)
    assert_ranks(found, naive_ranks(data, split, popular, "history"))
    for tile, hours in ((1, 24), (40, 24), (10_000, 24), (40, 1)):
        scorer = RecentlyPopular(MostPopular(data), Events.of(data, split), hours)
        found = rank_users(scorer, data, split, "history", MAX_LEN, tile=tile, batch=7)
        assert_ranks(found, naive_ranks(data, split, recent, "history"))


def test_tiles_and_batches_of_any_size_give_the_same_ranks(data: Sequences) -> None:
    table = torch.randint(0, 5, (data.num_users, data.num_items + 1), generator=torch.Generator().manual_seed(1))

    def scorer(batch: EvalBatch) -> Any:
        return lambda first, last: table[batch.users, first:last].float()

    results = [
        rank_users(scorer, data, "test", "window", MAX_LEN, tile=tile, batch=batch)
        for batch, tile in ((1, 1), (3, 7), (5, 64), (512, 1 << 20))
    ]
    for result in results[1:]:
        np.testing.assert_array_equal(result.ranks, results[0].ranks)
        np.testing.assert_array_equal(result.users, results[0].users)


@pytest.mark.parametrize("limits", [(1, 1, 1), (20, 3, 7), (1 << 18, 5, 1 << 24), (40, 1 << 15, 50)])
def test_the_kernels_batches_of_any_size_give_the_same_ranks(
    data: Sequences, limits: tuple[int, int, int], kernel: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Toy(data.num_items)
    model.vectors = torch.randn(model.vectors.shape, generator=torch.Generator().manual_seed(3)).to(device)
    expected = evaluate(model, data.to(device), "valid", "history", MAX_LEN, backend=kernel)
    for name, limit in zip(("TOKENS", "ROWS", "CELLS"), limits, strict=True):
        monkeypatch.setattr(user_batches, name, limit)
    monkeypatch.setattr(user_batches, "_ROUND", 2)
    found = evaluate(model, data.to(device), "valid", "history", MAX_LEN, backend=kernel)
    np.testing.assert_array_equal(found.places.better, expected.places.better)
    np.testing.assert_array_equal(found.places.ties, expected.places.ties)


def test_a_batch_reads_nothing_back(data: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of these calls would wait for everything before it: none happens between two batches."""
    monkeypatch.setattr(user_batches, "ROWS", 8)
    monkeypatch.setattr(user_batches, "places", lambda users, catalogue, rows, *rest: (rows.int(), rows.int()))
    users = user_batches.UserBatches(data, "test", "window", MAX_LEN)
    model = Toy(data.num_items).eval()
    catalogue = Catalogue.of(model.vectors, "torch")
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            assert seen[-1] != "repeat_interleave" or kwargs["output_size"] is not None
            return func(*args, **(kwargs or {}))

    with Recorder():
        for batch in users:
            users.places(users.encode(model.encode_last, batch), catalogue, batch)
    assert len(seen) > 50
    assert not {"_local_scalar_dense", "nonzero", "_unique2", "masked_select", "is_nonzero", "equal"} & set(seen)


def test_the_kernel_and_the_tiles_agree_to_four_decimals(data: Sequences, device: str) -> None:
    torch.manual_seed(0)
    model = SequentialRecommender(preset("hstu-trope", TINY), data.num_items, data.time_span).to(device)
    here = data.to(device)
    tiles, kernel = (
        evaluate(model, here, "test", "window", MAX_LEN, backend=backend) for backend in ("torch", "triton")
    )
    assert tiles.metrics.keys() == kernel.metrics.keys()
    for name, value in tiles.metrics.items():
        assert kernel.metrics[name] == pytest.approx(value, abs=5e-5), name
    assert tiles.users.tolist() == kernel.users.tolist()
    assert tiles.offsets.tolist() == kernel.offsets.tolist()


def test_histories_are_encoded_under_autocast_only_if_asked(data: Sequences, backend: Any, device: str) -> None:
    modes = []

    class Asked(Toy):
        def encode_last(self, *histories: torch.Tensor) -> torch.Tensor:
            modes.append(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
            return super().encode_last(*histories)

    model, here = Asked(data.num_items), data.to(device)
    model.vectors = model.vectors.to(device)
    exact = evaluate(model, here, "test", "none", MAX_LEN, precision="fp32", backend=backend)
    assert set(modes) == {False}
    modes.clear()
    coarse = evaluate(model, here, "test", "none", MAX_LEN, precision="bf16", backend=backend)
    assert set(modes) == {torch.bfloat16}
    np.testing.assert_array_equal(coarse.ranks, exact.ranks)  # there is nothing to round in a toy
    with pytest.raises(ValueError, match="precision must be 'auto', 'fp32' or 'bf16', got 'fp8'"):
        evaluate(model, here, "test", "none", MAX_LEN, precision="fp8")  # type: ignore[arg-type]


def test_a_collapsed_model_scores_like_guessing(data: Sequences, backend: Any, device: str) -> None:
    model = Toy(data.num_items)
    model.vectors = torch.full_like(model.vectors, 1 / 3).to(device)
    found = evaluate(model, data.to(device), "test", "none", MAX_LEN, backend=backend)
    assert set(found.ranks) == {(data.num_items + 1) / 2}
    assert found.metrics["Recall@10"] == pytest.approx(10 / data.num_items)


def test_outputs_that_are_not_finite_are_refused(data: Sequences, backend: Any, device: str) -> None:
    class Broken(Toy):
        def encode_last(self, *histories: torch.Tensor) -> torch.Tensor:
            out = super().encode_last(*histories)
            out[-1, 0] = torch.inf
            return out

    model = Broken(data.num_items)
    model.vectors = model.vectors.to(device)
    with pytest.raises(ValueError, match=r"outputs contain NaN or infinity.*train again"):
        evaluate(model, data.to(device), "test", "none", MAX_LEN, backend=backend)


def test_a_broken_or_foreign_model_is_refused(data: Sequences) -> None:
    model = Toy(data.num_items)
    model.vectors[3] = torch.nan
    with pytest.raises(ValueError, match=r"item vectors contain NaN.*train again"):
        evaluate(model, data, "test", "none", MAX_LEN)
    assert model.training
    with pytest.raises(ValueError, match=r"knows 99 items .* has 15: another catalogue"):
        evaluate(Toy(99), data, "test", "none", MAX_LEN)


def test_coarse_matmul_settings_do_not_reach_the_scores(data: Sequences) -> None:
    model = Toy(data.num_items)
    model.vectors = torch.randn(model.vectors.shape, generator=torch.Generator().manual_seed(2))
    expected = evaluate(model, data, "test", "none", MAX_LEN).ranks
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            np.testing.assert_array_equal(evaluate(model, data, "test", "none", MAX_LEN).ranks, expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def make_run(run: Path, data: Sequences, model: str = "hstu-trope", seed: int = 0) -> Path:
    """An untrained run, with the files that evaluation reads."""
    config = preset(model, TINY)
    torch.manual_seed(seed)
    SequentialRecommender(config, data.num_items, data.time_span).save_pretrained(run / "best")
    (run / "config.toml").write_text(to_toml(config))
    write_json(run / DATA, data.describe())
    return run


def command(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_prints_saves_and_writes_json(data: Sequences, tmp_path: Path) -> None:
    run = make_run(tmp_path / "my-run", data)
    said = command(run, "--json", tmp_path / "out.json", "--set", "eval.filter_seen=window")
    names = ["my-run", "most popular", "popular in 30 d", "popular in 7 d", "popular in 24 h", "popular in 1 h"]
    for expected in (*names, data.protocol.name, "filter_seen window", "NDCG@200"):
        assert expected in said
    written = json.loads((tmp_path / "out.json").read_text())
    *fixed, decayed, again = written["metrics"]
    assert fixed == names and decayed.startswith("decayed counts, ") and again == "again"
    assert decayed in said and again in said
    assert (written["checksum"], written["split"]) == (data.meta["checksum"], "test")
    result, about = saved_ranks.load(run, "test")
    assert about.filter_seen == "window"
    assert result.metrics == written["metrics"]["my-run"]
    model = SequentialRecommender.from_pretrained(run / "best")
    again = evaluate(model, data, "test", "window", MAX_LEN)
    np.testing.assert_array_equal(result.ranks, again.ranks)
    np.testing.assert_array_equal(result.places.better, again.places.better)
    assert f"{100 * again.metrics['MRR']:.2f}" in said


def test_baselines_that_are_equal_say_why(tmp_path: Path) -> None:
    """Plain dates have nothing in the last hour before a midnight; plain months have nothing in the last day either."""
    why = "no event lies in the last {} before t_now, for any test user"
    hour = f"'popular in 1 h' equals 'most popular': {why.format('hour')}"
    day = f"'popular in 24 h' equals 'most popular': {why.format('24 hours')}"
    week = f"'popular in 7 d' equals 'most popular': {why.format('7 days')}"
    lies = "every event of the last {} before t_now lies in the last {}, for every test user"
    within = [
        f"'popular in 7 d' equals 'popular in 24 h': {lies.format('7 days', '24 hours')}",
        f"'popular in 24 h' equals 'popular in 1 h': {lies.format('24 hours', 'hour')}",
    ]
    wanted = {DAY: [hour], 30 * DAY: [week, day, hour], 1: []}
    logs = {step: [(u, i, t - t % step) for u, i, t in random_log(rows=200, spread=10**7)] for step in wanted}
    # Sessions of half an hour, months apart. Every other user leaves before the last one.
    logs[0] = [(u, i % 5, START + i * 30 * DAY + 60 * u) for u in range(20) for i in range(8 + u % 2)]
    wanted[0] = within
    for step, log in logs.items():
        data = prepared(write_parquet(tmp_path / f"{step}.parquet", log), tmp_path / f"data{step}")
        scorers = baselines(data, "test", preset("hstu", TINY))
        assert equal_baselines(scorers, data, "test") == wanted[step], step
        metrics = {name: rank_users(scorer, data, "test", "none", MAX_LEN).metrics for name, scorer in scorers.items()}
        for sentence in wanted[step]:
            one, other = re.findall(r"'(.*?)'", sentence)[:2]
            assert metrics[one] == metrics[other]
    said = command(make_run(tmp_path / "[bold]run", prepared(tmp_path / f"{DAY}.parquet", tmp_path / "[red]data")))
    assert hour in " ".join(said.split()) and "[bold]run" in said and "[red]data," in said


def test_the_command_refuses_other_data_and_other_settings(data: Sequences, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", data)
    rows: list[Event] = random_log(seed=5)
    other = prepared(write_parquet(tmp_path / "log.parquet", rows), tmp_path / "other")
    with pytest.raises(ValueError, match=r"not the dataset that .* checksum .* --data"):
        command(run, "--data", other.path)
    with pytest.raises(FileNotFoundError, match="say where it is with --data"):
        command(run, "--data", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="only eval"):
        command(run, "--set", "train.lr=1")
    with pytest.raises(ValueError, match="split must be"):
        command(run, "--split", "train")
    with pytest.raises(FileNotFoundError, match=r"data\.json"):
        command(tmp_path)
    assert not list(run.glob("*.npz"))
    model = SequentialRecommender(preset("hstu-trope", TINY), data.num_items + 1, data.time_span)
    model.save_pretrained(run / "best")
    with pytest.raises(ValueError, match="another catalogue"):
        command(run)


def test_a_device_that_is_not_there_is_refused() -> None:
    from trope.train.distributed import choose_device

    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or such as cuda:1, got 'gpu'"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch finds no GPU"):
            choose_device("cuda")
