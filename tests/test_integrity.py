"""Nothing wrong gets through: changed, damaged and foreign files of runs and datasets are refused in one line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from training import one_thread, tiny, tiny_data, weights

from trope.cli.main import main
from trope.data.catalogue import Catalogue
from trope.data.sequences import Sequences
from trope.evaluate import saved_ranks
from trope.evaluate.evaluation import evaluate
from trope.experiments.pool import Run, Variant, describe
from trope.models.recommender import SequentialRecommender
from trope.serve.recommender import Recommender
from trope.train import checkpoint
from trope.train.loop import Trainer, train
from trope.train.optimizer import make_optimizer

__all__ = ["one_thread"]  # a fixture for every test in here
SAVED = Path(__file__).parent / "saved_by_b687b81"
REFUSALS = (ValueError, OSError)
# One epoch: it is the best and the last one, which a resumed training publishes.
REFIT = ("train.refit=true", "train.epochs=1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    return tiny_data(tmp_path_factory.mktemp("integrity"))


@pytest.fixture(scope="module")
def trained(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "trained"
    train(data, tiny("train.epochs=2"), run, "cpu", progress=False)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A finished run of two epochs, to be damaged."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def folder(data: Sequences, tmp_path: Path) -> Path:
    """A prepared dataset, to be damaged."""
    return shutil.copytree(data.path, tmp_path / "folder")


def last_of(run: Path) -> Path:
    return sorted((run / "checkpoints").iterdir())[-1]


def resume(data: Sequences, run: Path, *settings: str) -> dict[str, Any]:
    return train(data, tiny("train.epochs=3", *settings), run, "cpu", resume=True, progress=False)


def flip(path: Path, place: int, bit: int = 0) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 1 << bit
    path.write_bytes(damaged)


def digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file as a forger would: its own checksum fits again."""
    content = json.loads(path.read_text())
    sealed = content.pop("sha256", None) is not None
    change(content)
    if path.name == "meta.json":
        content["checksum"] = digest({k: v for k, v in content.items() if k not in ("checksum", "made_by", "dropped")})
    path.write_text(json.dumps({**content, "sha256": digest(content)} if sealed else content))


def put_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], Any], forged: bool) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")
    if forged:
        sha256 = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
        edit(model / "config.json", lambda content: content["files"].update({"model.safetensors": sha256}))


# Weights and checkpoints.


def test_a_flipped_bit_in_the_weights_is_refused(run: Path) -> None:
    flip(run / "best" / "model.safetensors", -1)
    for load in (Recommender.from_pretrained, lambda run: SequentialRecommender.from_pretrained(run / "best")):
        with pytest.raises(ValueError, match=r"model\.safetensors: its SHA-256 is .*changed or damaged"):
            load(run)
    assert Recommender.from_pretrained(run, "cpu", verify=False).model.num_items == 20
    assert SequentialRecommender.from_pretrained(run / "best", verify=False).num_items == 20


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("verify", [True, False])
def test_one_weight_that_is_not_finite_is_refused(run: Path, value: float, verify: bool) -> None:
    put_weights(run / "best", lambda tensors: tensors["items.weight"][7].fill_(value), forged=True)
    with pytest.raises(ValueError, match=r"items\.weight has 8 of 168 numbers that are NaN or infinite"):
        Recommender.from_pretrained(run, "cpu", verify=verify)


def test_older_weights_have_no_checksum_but_must_be_finite(tmp_path: Path) -> None:
    old = shutil.copytree(SAVED / "hstu-trope", tmp_path / "old")
    assert SequentialRecommender.from_pretrained(old).num_items
    put_weights(old, lambda tensors: tensors["items.weight"][1].fill_(torch.nan), forged=False)
    with pytest.raises(ValueError, match="NaN or infinite"):
        SequentialRecommender.from_pretrained(old)


def test_todays_format_needs_its_checksum(run: Path) -> None:
    for change in (lambda content: content.pop("files"), lambda content: content.update(files={})):
        edit(run / "best" / "config.json", change)
        with pytest.raises(ValueError, match=r"it has no files|no SHA-256 of model\.safetensors"):
            SequentialRecommender.from_pretrained(run / "best")


@pytest.mark.parametrize("name", ["best/config.json", "catalogue/catalogue.json", "data.json", "metrics.json"])
def test_no_flipped_bit_of_a_record_changes_what_is_read(run: Path, name: str) -> None:
    path, rng = run / name, random.Random(0)
    whole = path.read_bytes()
    expected, refused = READ[name](run), 0
    for place in rng.sample(range(len(whole)), 60):
        flip(path, place, rng.randrange(8))
        try:
            assert READ[name](run) == expected
        except REFUSALS as error:
            refused += one_line(error)
        path.write_bytes(whole)
    assert refused > 40  # a blank may become another one


def read_model(run: Path) -> Any:
    model = SequentialRecommender.from_pretrained(run / "best")
    return model.config, model.num_items, model.time_span


def read_result(run: Path) -> Any:
    return describe(Run(Variant("a", "hstu-trope"), 42, run))


# How each record of a run is read.
READ: dict[str, Callable[[Path], Any]] = {
    "best/config.json": read_model,
    "catalogue/catalogue.json": lambda run: Catalogue.load(run / "catalogue").item_ids.to_list(),
    "data.json": lambda run: Sequences.of_run(run).meta["checksum"],
    "metrics.json": read_result,
    "env.json": read_result,
}


def one_line(error: BaseException) -> int:
    assert "\n" not in str(error) and len(str(error)) < 600, error
    return 1


def test_an_emptied_optimiser_is_not_resumed(data: Sequences, run: Path) -> None:
    save_file({}, last_of(run) / "optimizer.safetensors")
    with pytest.raises(ValueError, match=r"optimizer\.safetensors: its SHA-256.*remove .* to resume from"):
        resume(data, run)

    def as_before(content: dict[str, Any]) -> None:
        content["format"] = 1
        del content["files"]

    edit(
        last_of(run) / "state.json", as_before
    )  # no checksum, as in older versions: the moments are missed all the same
    with pytest.raises(ValueError, match=r"optimizer\.safetensors is empty although \d+ steps were done"):
        resume(data, run)


def test_an_optimiser_that_has_lost_one_moment_is_not_resumed(data: Sequences, run: Path) -> None:
    """Without checksums, as older versions saved it: the missing tensor itself must be seen."""
    path = last_of(run) / "optimizer.safetensors"
    tensors = load_file(path)
    del tensors[next(name for name in tensors if name.endswith("/exp_avg_sq"))]
    save_file(tensors, path)

    def as_before(content: dict[str, Any]) -> None:
        content["format"] = 1
        del content["files"]

    edit(last_of(run) / "state.json", as_before)
    with pytest.raises(ValueError, match=r"has no exp_avg_sq of .*remove .* to resume from"):
        resume(data, run)


def test_changed_learning_rates_are_not_resumed(data: Sequences, run: Path) -> None:
    path = last_of(run) / "state.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "learning_rates": [0.5] * len(content["learning_rates"])}))
    with pytest.raises(ValueError, match=r"state\.json.*does not match its own checksum.*remove"):
        resume(data, run)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "model", "model/model.safetensors", "model/config.json"])
def test_files_of_another_checkpoint_are_not_resumed(data: Sequences, run: Path, name: str) -> None:
    first, last = sorted((run / "checkpoints").iterdir())
    (first / name).replace(last / name) if name != "model" else shutil.copytree(
        first / name, last / name, dirs_exist_ok=True
    )
    with pytest.raises(ValueError, match=f"{last.name}.*(SHA-256|another checkpoint)"):
        resume(data, run)


def test_checkpoints_of_older_versions_are_resumed(data: Sequences, run: Path, tmp_path: Path) -> None:
    expected = shutil.copytree(run, tmp_path / "expected")
    resume(data, expected)

    def older(content: dict[str, Any]) -> None:
        content["format"] = 1 if content["format"] == 2 else "trope-model-1"
        del content["files"]

    for path in (
        *run.glob("checkpoints/*/state.json"),
        *run.glob("**/model/config.json"),
        run / "best" / "config.json",
    ):
        edit(path, older)
        content = json.loads(path.read_text())
        del content["sha256"]
        path.write_text(json.dumps(content))
    resume(data, run)
    assert weights(run) == weights(expected)


def test_a_config_that_was_changed_is_noticed(
    data: Sequences, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "config.toml"
    whole = path.read_text()
    path.write_text(whole.replace("max_len = 8", "max_len = 3"))
    assert "model.max_len was 8, now 3" in refusal(["evaluate", str(run), "--device", "cpu"], monkeypatch, capsys)
    path.write_text(whole.replace("lr = 0.001", "lr = 0.5"))
    said = refusal(
        ["train", str(data.path), "--out", str(run), "--resume", "--set", "train.epochs=3"], monkeypatch, capsys
    )
    assert "train.lr was 0.001, now 0.5" in said


def refusal(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command exits with code 2."""
    monkeypatch.setattr(sys, "argv", ["trope", *words])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1, said
    return said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_items": 10**9}, "do not fit its config: items.weight"),
        ({"num_items": 10**30}, "damaged"),
        ({"width": 65_536}, "do not fit its config"),
        ({"width": 10**9}, "model.width must lie between"),
        ({"max_len": 1_048_576}, "do not fit its config"),
        ({"time_span": [0, 2**62]}, "time_span"),
    ],
)
def test_sizes_are_compared_before_memory_is_taken(run: Path, change: dict[str, Any], words: str) -> None:
    def forge(content: dict[str, Any]) -> None:
        (content["config"]["model"] if {"width", "max_len"} & change.keys() else content).update(change)

    edit(run / "best" / "config.json", forge)
    SequentialRecommender.from_pretrained(SAVED / "hstu")  # what a first load imports is not meant
    with limited(resource.RLIMIT_AS, pages() + (1 << 30)), pytest.raises(ValueError, match=words):
        SequentialRecommender.from_pretrained(run / "best")


def pages() -> int:
    """Bytes of address space in use."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


# Prepared arrays whose checksums were computed again.


def forge_array(folder: Path, name: str, change: Callable[[np.ndarray], Any]) -> None:
    path = folder / f"{name}.npy"
    array = np.load(path)
    changed = change(array)
    np.save(path, (array if changed is None else changed).astype(array.dtype))

    def entry(meta: dict[str, Any]) -> None:
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        meta["arrays"][name] |= {"bytes": path.stat().st_size, "sha256": sha256}

    edit(folder / "meta.json", entry)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("items", lambda x: x * 0, "items from 0 to 0, they must be 1 to 20"),
        ("items", lambda x: x * 0 + 1, "19 of 20 items without an event"),
        ("items", lambda x: x + 1, "items from 2 to 21"),
        ("items", lambda x: -x, "items from -20"),
        ("times", lambda x: x[::-1], "out of order"),
        ("times", lambda x: x * 0, "times from 0 to 0"),
        ("times", lambda x: x * 0 + 2**62, "must be Unix seconds until 2100"),
        ("times", lambda x: x * 1000, "must be Unix seconds until 2100"),
        ("times", lambda x: x - 86_400, "its training events lie in"),
        ("offsets", lambda x: x[::-1], "do not fit together"),
        ("offsets", lambda x: np.concatenate((x[:1], x[2:3], x[1:2], x[3:])), "do not fit together"),
        ("offsets", lambda x: np.concatenate((x[:1], x[1:2] - 1, x[2:])), "order|splits|fit together"),
        ("splits", lambda x: x[::-1], "do not fit together|are not those of its protocol"),
        ("splits", lambda x: x[[3, 3, 2, 3]], "are not those of its protocol loo-strict"),
        ("splits", lambda x: x + 1, "do not fit together"),
    ],
)
def test_arrays_that_no_preparation_writes_are_refused(folder: Path, name: str, change: Any, words: str) -> None:
    forge_array(folder, name, change)
    with pytest.raises(ValueError, match=words) as caught:
        Sequences.load(folder)
    assert "prepare the data again" in str(caught.value)


@pytest.mark.parametrize("protocol", ["loo-paper", "holdout", "next-basket"])
def test_what_a_preparation_writes_is_accepted(tmp_path: Path, protocol: str) -> None:
    data = tiny_data(tmp_path, protocol)
    assert Sequences.load(data.path).num_events == data.num_events


def test_user_ids_are_verified(folder: Path) -> None:
    data = Sequences.load(folder)
    (path,) = [path for path in folder.glob("user_ids*") if not path.name.endswith(".ends.npy")]
    flip(path, -1)
    with pytest.raises(ValueError, match="does not match its checksum"):
        data.ids("user_ids")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda meta: meta["counts"].update(items=10**9), "do not fit together"),
        (lambda meta: meta["counts"].update(users=3), "do not fit together"),
        (lambda meta: meta["protocol"].update(name="holdout"), "holdout without a cutoff"),
        (lambda meta: meta["protocol"].update(mood="good"), "protocol that trope does not know"),
        (lambda meta: meta["protocol"].update(name=7), "name must be a name, got 7"),
        (lambda meta: meta["arrays"]["items"].update(shape=[]), r"the shape \[\]"),
        (lambda meta: meta["arrays"]["items"].update(shape=[10**12]), r"expected int32 \[1000000000000\]"),
        (lambda meta: meta["arrays"].update({"../../x": {}}), "does not know"),
        (lambda meta: meta["time_span"].update(train=[1]), "do not fit together"),
    ],
)
def test_a_forged_meta_is_refused(folder: Path, change: Any, words: str) -> None:
    edit(folder / "meta.json", change)
    with pytest.raises(ValueError, match=words):
        Sequences.load(folder)


# A refit, killed.


def agree(data: Sequences, run: Path) -> bool:
    """Whether metrics.json, where there is one, is of the model in best/; and the ranks too."""
    if not (run / "metrics.json").is_file():
        return True
    model = SequentialRecommender.from_pretrained(run / "best")
    found = evaluate(model, data, "test", "none", 8).metrics
    return found == json.loads((run / "metrics.json").read_text())["test"] == saved_ranks.load(run, "test")[0].metrics


@pytest.fixture(scope="module")
def refitted(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "refitted"
    train(data, tiny(*REFIT), run, "cpu", progress=False)
    return run


class Killed(BaseException):
    """No handler of ours may catch it."""


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("place", range(7))
def test_killed_at_any_save_of_a_resumed_refit_metrics_and_model_agree(
    data: Sequences, refitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int, epochs: int
) -> None:
    run = shutil.copytree(refitted, tmp_path / "run")
    before, save, left = weights(run), SequentialRecommender.save_pretrained, [place]

    def killed(model: SequentialRecommender, folder: Path) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        save(model, folder)

    config = tiny(*REFIT, f"train.epochs={epochs}")
    with monkeypatch.context() as patch:
        patch.setattr(SequentialRecommender, "save_pretrained", killed)
        with contextlib.suppress(Killed):
            train(data, config, run, "cpu", resume=True, progress=False)
    assert agree(data, run)
    if epochs == 1:
        assert weights(run) == before and (run / "metrics.json").is_file()
    elif place in (0, 3):
        train(data, config, run, "cpu", resume=True, progress=False)
        assert agree(data, run) and (run / "metrics.json").is_file()


def test_a_finished_refit_keeps_its_model_while_it_is_resumed(
    data: Sequences, refitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(refitted, tmp_path / "run")
    before = weights(run)

    def killed(*arguments: Any) -> None:
        raise Killed

    monkeypatch.setattr(Trainer, "run", killed)
    with pytest.raises(Killed):
        train(data, tiny(*REFIT), run, "cpu", resume=True, progress=False)
    assert weights(run) == before and agree(data, run)


def test_metrics_go_before_another_model_comes(data: Sequences, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a refit too: a finished run that goes on may find a better epoch."""
    model = SequentialRecommender.from_pretrained(run / "best")
    checkpoint.publish(model, run)
    assert (run / "metrics.json").is_file()  # the same model again changes nothing
    with torch.no_grad():
        model.items.weight[1] += 1
    checkpoint.publish(model, run)
    assert not (run / "metrics.json").exists() and not (run / "ranks-test.npz").exists()
    assert not list(run.glob(".best*"))


# Not a line: what used to be a traceback.


@pytest.mark.parametrize("most", [100, 3000])
def test_a_full_disk_ends_a_training_in_one_line(
    data: Sequences, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], most: int
) -> None:
    last = last_of(run)
    words = ["train", str(data.path), "--out", str(run), "--resume", "--set", "train.epochs=3", "--no-progress"]
    monkeypatch.setattr("trope.runs.write_text", lambda path, text: None)  # config.toml, which is written first
    with limited(resource.RLIMIT_FSIZE, most):
        said = refusal([*words, "--device", "cpu"], monkeypatch, capsys)
    assert f"{run} could not be written" in said and "File too large" in said and "--resume" in said
    assert f"the last good checkpoint is {last}" in said
    assert not list(run.rglob("*partial*"))


def test_two_cannot_train_into_one_folder(data: Sequences, run: Path) -> None:
    ready, asked = os.pipe()
    child = os.fork()
    if not child:
        try:
            from trope.runs import RunLock

            with RunLock() as lock:
                lock.take(run)
                os.write(asked, b".")
                time.sleep(60)
        finally:
            os._exit(1)
    os.close(asked)  # so that a child that fails is not waited for
    try:
        assert os.read(ready, 1) == b"."
        with pytest.raises(
            OSError, match=rf"another process \({child} on {os.uname().nodename}\) trains into .*wait"
        ) as caught:
            resume(data, run)
        assert "\n" not in str(caught.value)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert resume(data, run)["epochs"] == 3  # the lock died with its process
    assert resume(data, run)["epochs"] == 3  # and with the training


WRONG: list[Any] = [None, True, -1, 1.5, "x", [], {}, [None], {"a": {}}, 10**25]


@pytest.mark.parametrize(
    "name",
    [
        "best/config.json",
        "data.json",
        "metrics.json",
        "env.json",
        "catalogue/catalogue.json",
        "state.json",
        "meta.json",
    ],
)
def test_missing_and_wrong_values_are_refused_or_harmless(data: Sequences, run: Path, folder: Path, name: str) -> None:
    """Each name of each JSON file, down to the third level: left out, or with a value of another type."""
    path = {"state.json": last_of(run) / name, "meta.json": folder / name}.get(name, run / name)
    whole, config = path.read_text(), tiny()
    model = SequentialRecommender(config, data.num_items, data.time_span)

    def use() -> None:
        if name == "state.json":
            checkpoint.load(last_of(run), model, make_optimizer(model, config))
        elif name == "meta.json":
            found = Sequences.load(folder)
            found.describe(), found.eval_batch("test", found.eval_users("test")[:2], 8)
        else:
            READ[name](run)

    use()
    refused = 0
    for keys in paths_in(json.loads(whole)):
        for wrong in random.Random(str(keys)).sample([*WRONG, ...], 2):
            edit(path, lambda content, keys=keys, wrong=wrong: put(content, keys, wrong))
            try:
                use()
            except REFUSALS as error:
                refused += one_line(error)
            path.write_text(whole)
    assert refused or name == "env.json"  # nothing is computed from that


def paths_in(content: Any, depth: int = 3) -> list[tuple[str, ...]]:
    if not isinstance(content, dict) or not depth:
        return []
    return [(key, *rest) for key, inner in content.items() for rest in ((), *paths_in(inner, depth - 1))]


def put(content: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    for key in keys[:-1]:
        content = content[key]
    if value is ...:
        content.pop(keys[-1], None)
    else:
        content[keys[-1]] = value


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[" * 500 + "]" * 500, "", "nul", '"\\ud800"', "7" * 5000]
)
def test_no_text_is_a_traceback(run: Path, folder: Path, data: Sequences, text: str) -> None:
    def check(path: Path, use: Callable[[], Any]) -> None:
        whole = path.read_bytes()
        path.write_text(text)
        with pytest.raises(ValueError, match=path.name) as caught:
            use()
        one_line(caught.value)
        path.write_bytes(whole)

    for name, read in READ.items():
        check(run / name, lambda read=read: read(run))
    check(folder / "meta.json", lambda: Sequences.load(folder))
    check(last_of(run) / "state.json", lambda: resume(data, run))
    if text:  # an empty TOML file is one
        check(run / "config.toml", lambda: read_result(run))


def test_a_damaged_log_does_not_stop_a_run(data: Sequences, run: Path) -> None:
    path = run / "log.jsonl"
    good = path.read_bytes()
    lines = [b"[]", b"7", b'{"step": 1}', b'{"step": "1", "epoch": 1}', b"\xff\xfe", b"[" * 100_000, b'{"step": 1, "ep']
    path.write_bytes(b"\n".join(lines[:3]) + b"\n" + good + b"\n".join(lines))
    resume(data, run)
    kept = path.read_bytes()
    assert kept.startswith(good) and all(json.loads(line)["epoch"] for line in kept.splitlines())


def test_damaged_ranks_are_refused_or_the_same(run: Path) -> None:
    path, rng = run / "ranks-test.npz", random.Random(1)
    whole, expected = path.read_bytes(), saved_ranks.load(run, "test")
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 8))):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged if rng.random() < 0.8 else damaged[: rng.randrange(len(damaged))])
        try:
            found = saved_ranks.load(run, "test")
        except ValueError as error:
            one_line(error)
        else:
            assert found[1] == expected[1] and np.array_equal(found[0].ranks, expected[0].ranks)
    path.write_bytes(whole)
    shutil.copy(path, run / "ranks-valid.npz")
    with pytest.raises(ValueError, match="damaged or foreign"):
        saved_ranks.load(run, "valid")


@pytest.mark.parametrize(
    "change",
    [{"ranks": 0.0}, {"ranks": np.nan}, {"offsets": 0}, {"users": 1}, {"ties": -1}, {"about": "[]"}, {"about": "{}"}],
    ids=str,
)
def test_forged_ranks_are_refused(run: Path, change: dict[str, Any]) -> None:
    path = run / "ranks-test.npz"
    with np.load(path) as stored:
        arrays = dict(stored)
    ((name, value),) = change.items()
    arrays[name] = np.array(value) if name == "about" else np.full_like(arrays[name], value)
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="damaged or foreign"):
        saved_ranks.load(run, "test")
