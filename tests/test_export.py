"""`trope export`: folders that are whole, compared and checked, and answers that are the model's.

The tests at the end, marked `export`, write every model in every format; AOTInductor compiles for minutes.
"""

from __future__ import annotations

import json
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from data_logs import START, loose, prepared, random_log, write_parquet
from torch import Tensor, nn
from typer.testing import CliRunner

from trope import TRoPE
from trope.cli.main import app
from trope.data.protocols import Protocol
from trope.data.sequences import Sequences
from trope.models.recommender import SequentialRecommender
from trope.runs import open_run
from trope.serve.export import formats, parity
from trope.serve.export.exported import ExportedModel
from trope.serve.export.folder import export
from trope.serve.export.frozen import FrozenRotary, Turning
from trope.serve.export.parity import made_up
from trope.serve.recommender import Recommender
from trope.settings import preset
from trope.times import DAY

SIX = ("hstu", "hstu-time", "hstu-trope", "sasrec", "tisasrec", "trope")
TINY = ["model.width=8", "model.heads=2", "model.head_dim=4", "model.max_len=6"]
NOW = START + 2_000_000


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sequences:
    folder = tmp_path_factory.mktemp("shop")
    log = write_parquet(folder / "log.parquet", random_log(rows=900, users=30, items=120))
    return prepared(log, folder / "data", loose(protocol=Protocol("next-basket")))


def make_run(data: Sequences, run: Path, name: str, *more: str) -> Path:
    """A run as an update leaves it, with weights that matter; a pulse is fitted, and its age began a day ago."""
    torch.manual_seed(0)
    config = preset(name, [*TINY, *more])
    open_run(run, data, config, resume=False)
    model = SequentialRecommender(config, data.num_items, data.time_span, age_from=data.time_span[1] - DAY)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "bias.position" in path or "bias.time" in path or "delta" in path:
                parameter.normal_()
        if model.pulse is not None:
            model.pulse.get_buffer("everybody").normal_(0, 0.3)
            model.pulse.get_buffer("own").normal_(0, 0.3)
            model.pulse.get_buffer("age_unit").fill_(3 * DAY)
            model.pulse.keep(at_end(model, data))
    model.save_pretrained(run / "best")
    return run


def at_end(model: SequentialRecommender, data: Sequences):
    assert model.pulse is not None
    stream = model.pulse.count(data.items, data.times)
    list(stream.at(torch.tensor([int(data.times.max()) + 1])))
    return stream


def test_phases_stay_exact_in_onnx_runtime_until_2100(tmp_path: Path) -> None:
    """Each plane's angle against rational arithmetic, at times from 1970 to 2100, some at the ends of 32 bits."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from trope.serve.export.onnx_integers import TRANSLATIONS

    torch.manual_seed(0)
    frozen = FrozenRotary(TRoPE(32, time_span=(1_500_000_000, 1_560_000_001), shifted=False))

    class Angles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary, self.turning = frozen, Turning([frozen])

        def forward(self, times: Tensor) -> tuple[Tensor, Tensor]:
            return self.turning(*self.rotary.coordinates_at(times, times, times))

    draw = np.random.default_rng(0)
    times = np.concatenate((draw.integers(0, 4_102_444_800, 200), [0, 2**31 - 1, 2**31, 2**32 - 1, 4_102_444_799]))
    times_T = torch.from_numpy(times)
    graph = torch.export.export(
        Angles(), (times_T,), dynamic_shapes=({0: torch.export.Dim("T", min=1, max=1 << 20)},), strict=True
    )
    path = tmp_path / "angles.onnx"
    made = torch.onnx.export(graph, dynamo=True, verbose=False, custom_translation_table=TRANSLATIONS)
    assert made is not None
    made.save(path)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    cos, sin = session.run(None, {session.get_inputs()[0].name: times})  # [T, 2, 1, 1, D], sin with both signs
    angles = np.arctan2(sin.astype(np.float64), cos.astype(np.float64))[:, :, 0, 0, 1::2]
    since = times - int(frozen.t0)
    for side, freqs in enumerate((frozen.freqs_q, frozen.freqs_k)):
        exact = [[Fraction(f) * int(t) % 1 for f in freqs[0].tolist()] for t in since]
        apart = np.array([[float(turn) for turn in row] for row in exact]) - angles[:, side] / (2 * np.pi)
        assert np.abs(2 * np.pi * (apart - np.round(apart))).max() <= 1e-6


@pytest.fixture(scope="module")
def sasrec(data: Sequences, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of one block, and its folder of format torch, which is the quickest to write."""
    folder = tmp_path_factory.mktemp("sasrec")
    run = make_run(data, folder / "run", "sasrec", "model.blocks=1")
    result = CliRunner().invoke(app, ["export", str(run), "--format", "torch", "--out", str(folder / "out")])
    assert result.exit_code == 0, result.output
    assert "512 made-up users" in result.output
    return run, folder / "out"


def test_the_manifest_describes_the_folder(sasrec: tuple[Path, Path]) -> None:
    content = json.loads((sasrec[1] / "manifest.json").read_text())
    assert content["format"] == "torch" and content["torch"] == torch.__version__ and content["built_for"] == "any"
    assert content["programs"]["remember"]["inputs"] == [
        {"name": "table", "dtype": "float32", "shape": ["rows", 8]},
        {"name": "items", "dtype": "int64", "shape": ["B", "L"]},
        {"name": "times", "dtype": "int64", "shape": ["B", "L"]},
        {"name": "lengths", "dtype": "int64", "shape": ["B"]},
    ]
    assert content["programs"]["remember"]["output"] == {
        "name": "kept", "dtype": "float32", "shape": [2, "B", 2, "L", 4]
    }  # fmt: skip
    assert content["programs"]["encode"]["output"] == {"name": "vectors", "dtype": "float32", "shape": ["B", 8]}
    assert content["dims"]["L"] == [2, 6] and content["pulse"] is None and content["predicts"] == "next-event"
    assert 0 <= content["parity"]["cosines"] <= 1e-6 and content["parity"]["users"] == 512
    written = {path.relative_to(sasrec[1]).as_posix() for path in sasrec[1].rglob("*") if path.is_file()}
    assert set(content["files"]) == written - {"manifest.json"}


def test_batch_length_and_moments_are_free(sasrec: tuple[Path, Path]) -> None:
    model, exported = Recommender.from_pretrained(sasrec[0], "cpu"), ExportedModel.load(sasrec[1])
    for users, most, moments in ((1, 1, 1), (1, 6, 5), (7, 2, 1), (4, 6, 3)):
        items = torch.randint(1, 100, (users, most))
        times = START + torch.arange(most).expand(users, most) * DAY
        lengths = torch.randint(1, most + 1, (users,))
        at = NOW + DAY * torch.arange(moments).expand(users, moments)
        with torch.inference_mode():
            wanted = model.model.remember(items, times, lengths).look(at)
            got = exported.model.remember(items, times, lengths).look(at)
            at_once = exported.model.encode_last(items, times, lengths, at[:, 0])
        assert torch.allclose(got, wanted, rtol=0, atol=5e-7)
        assert torch.allclose(at_once, wanted[:, 0], rtol=0, atol=5e-7)


def test_it_answers_as_a_recommender_does(sasrec: tuple[Path, Path], data: Sequences) -> None:
    model, exported = Recommender.from_pretrained(sasrec[0], "cpu"), ExportedModel.load(sasrec[1])
    ids = [int(item) for item in model.catalogue.originals(np.array([3, 5, 9]))]
    events = pl.DataFrame({"user_id": [1, 1, 2], "item_id": ids, "timestamp": [START, START + DAY, START + DAY]})
    wanted, got = (each.recommend(events, t_now=NOW, k=10, filter_seen="history") for each in (model, exported))
    assert wanted.drop("score").equals(got.drop("score"))
    assert np.abs(wanted["score"].to_numpy() - got["score"].to_numpy()).max() <= 1e-6
    histories, moments = made_up(model, 20, 3)
    sweep = moments[:, None] + DAY * np.arange(4)
    by_model, by_programs = (each.rank_moments(histories, sweep, k=10) for each in (model, exported))
    assert np.abs(by_model.scores_BMK - by_programs.scores_BMK).max() <= 1e-6


@pytest.mark.parametrize("program", ["encode", "look", "remember"])
def test_the_comparison_asks_every_program(sasrec: tuple[Path, Path], program: str) -> None:
    model, exported = Recommender.from_pretrained(sasrec[0], "cpu"), ExportedModel.load(sasrec[1])
    assert parity.compare(model, exported, users=10).holds
    run = exported.model.runs[program]  # type: ignore[index]
    exported.model.runs[program] = lambda *inputs: run(*inputs) * 1.001  # type: ignore[index]
    assert not parity.compare(model, exported, users=10).holds


@pytest.mark.parametrize("name", ["encode.pt2", "remember.pt2", "items.safetensors", "catalogue/item_ids.npy"])
def test_a_changed_file_is_refused(sasrec: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(sasrec[1], tmp_path / "copy")
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"does not match its SHA-256 in manifest.json; copy the folder again"):
        ExportedModel.load(folder)
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=r"is missing although manifest.json lists it"):
        ExportedModel.load(folder)


def rewritten(folder: Path, **changes: object) -> Path:
    """The folder with another manifest, sealed anew."""
    from trope.runs import seal, write_json

    content = json.loads((folder / "manifest.json").read_text())
    del content["sha256"]
    write_json(folder / "manifest.json", seal({**content, **changes}))
    return folder


@pytest.mark.parametrize(("changes", "match"), [
    ({"version": "trope-export-9"}, "is not of version"),
    ({"format": "pickle"}, "is damaged: format 'pickle'"),
    ({"time_span": [9, 3]}, "is damaged: time_span"),
    ({"programs": {"look": {}}}, "lists the programs"),
    ({"built_for": "Linux m68k DEFAULT"}, "was compiled for Linux m68k DEFAULT, this machine is"),
    ({"files": {}}, "lists no encode.pt2, items.safetensors"),
    ({"num_items": 5}, "is of another model"),
    ({"pulse": {"turning": -1}}, "pulse.turning -1"),
    ({"pulse": {"turning": 2, "age_from": "noon"}}, "pulse.age_from 'noon'"),
])  # fmt: skip
def test_a_foreign_manifest_is_refused(
    sasrec: tuple[Path, Path], tmp_path: Path, changes: dict[str, object], match: str
) -> None:
    folder = rewritten(shutil.copytree(sasrec[1], tmp_path / "copy"), **changes)
    with pytest.raises(ValueError, match=match):
        ExportedModel.load(folder)


def test_no_file_outside_of_the_folder_is_named(sasrec: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(sasrec[1], tmp_path / "copy")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    with pytest.raises(ValueError, match="that trope would not write"):
        ExportedModel.load(rewritten(folder, files={**files, "../run/x.json": {"bytes": 1, "sha256": ""}}))
    (folder / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no manifest.json"):
        ExportedModel.load(folder)


def test_a_folder_that_answers_otherwise_is_not_published(
    sasrec: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of weights that differ in the fourth digit."""
    run = shutil.copytree(sasrec[0], tmp_path / "run")
    model = SequentialRecommender.from_pretrained(run / "best")
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight.mul_(1.001)
    model.save_pretrained(run / "best")
    monkeypatch.setattr(formats, "write", lambda _, kind, path: shutil.copyfile(sasrec[1] / path.name, path))
    result = CliRunner().invoke(app, ["export", str(run), "--format", "torch", "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, ValueError) and "differ from the model: cosines by up to" in str(
        result.exception
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_exported_is_said_at_once(
    sasrec: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="must be one of aoti, onnx, torch, got 'pickle'"):
        export(sasrec[0], "pickle", tmp_path / "out")
    with pytest.raises(FileExistsError, match="is not an empty folder; choose another --out"):
        export(sasrec[0], "torch", sasrec[1])
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        export(tmp_path / "none", "torch", tmp_path / "out")
    monkeypatch.setattr(formats, "compiler", lambda: None)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler"):
        export(sasrec[0], "aoti", tmp_path / "out")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(ValueError, match=r"needs onnxruntime, which is not installed: pip install 'trope\[export\]'"):
        export(sasrec[0], "onnx", tmp_path / "out")


def check_format(data: Sequences, folder: Path, name: str, kind: str, *more: str) -> ExportedModel:
    """Export a model, and compare for other users than the export itself did."""
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    if kind == "aoti" and formats.compiler() is None:
        pytest.skip("AOTInductor needs a C++ compiler, and this machine has neither g++ nor clang++")
    run = make_run(data, folder / "run", name, *more)
    assert export(run, kind, folder / "out").holds
    exported = ExportedModel.load(folder / "out")
    assert parity.compare(Recommender.from_pretrained(run, "cpu"), exported, users=200, seed=5).holds
    return exported


def test_trope_in_onnx_with_a_pulse_and_baskets(data: Sequences, tmp_path: Path) -> None:
    exported = check_format(data, tmp_path, "trope", "onnx", "model.predicts=next-moment", "model.blocks=1")
    assert exported.manifest.turning == 2 and sorted(exported.manifest.programs) == ["encode", "look", "remember"]


def test_tisasrec_in_onnx_is_one_program(data: Sequences, tmp_path: Path) -> None:
    assert list(check_format(data, tmp_path, "tisasrec", "onnx", "model.blocks=1").manifest.programs) == ["encode"]


@pytest.mark.export
@pytest.mark.parametrize("kind", formats.FORMATS)
@pytest.mark.parametrize("name", SIX)
def test_every_model_in_every_format(data: Sequences, tmp_path: Path, name: str, kind: str) -> None:
    check_format(data, tmp_path, name, kind)


@pytest.mark.export
@pytest.mark.parametrize("kind", formats.FORMATS)
@pytest.mark.parametrize("name", ["trope", "sasrec-trope", "transformer-trope"])
def test_models_of_baskets_in_every_format(data: Sequences, tmp_path: Path, name: str, kind: str) -> None:
    check_format(data, tmp_path, name, kind, "model.predicts=next-moment")


@pytest.mark.export
def test_packed_weights_in_aoti(data: Sequences, tmp_path: Path) -> None:
    check_format(data, tmp_path, "sasrec", "aoti", "model.width=512", "model.head_dim=256", "model.blocks=1")
