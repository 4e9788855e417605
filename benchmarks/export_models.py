"""What the benchmarks of exports share: six presets with weights far from where training begins, and result files."""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trope.data.catalogue import FORMAT, Catalogue
from trope.data.folder import sha256_of
from trope.environment import describe
from trope.models.recommender import SequentialRecommender
from trope.runs import CATALOGUE, CATALOGUE_RECORD, seal, write_json
from trope.serve.export.exported import ExportedModel
from trope.serve.export.folder import fill
from trope.serve.export.manifest import MANIFEST
from trope.serve.recommender import Recommender
from trope.settings import preset

SIX = ("hstu", "hstu-time", "hstu-trope", "sasrec", "tisasrec", "trope")
ITEMS = 5_000
SPAN = (1_480_000_000, 1_512_000_000)


class Size(NamedTuple):
    """Sizes of a model, and what its queries look from."""

    width: int
    blocks: int
    heads: int
    head_dim: int
    length: int
    predicts: str

    @property
    def words(self) -> str:
        """For headings."""
        blocks = "1 block" if self.blocks == 1 else f"{self.blocks} blocks"
        return f"width {self.width}, {blocks}, {self.length} events, {self.predicts}"


SIZES = {
    "demo": Size(64, 1, 4, 32, 64, "next-moment"),  # what `make demo` trains
    "default": Size(512, 2, 4, 128, 50, "next-event"),  # what the presets say
}


def recommender_of(name: str, folder: Path, items: int, size: Size) -> Recommender:
    """A preset of one size. Its catalogue is written to `folder`.

    Biases, frequencies and the pulse are drawn anew: as training begins, most of them do next to nothing.
    """
    torch.manual_seed(0)
    # Only HSTU's heads need not fill the width.
    head_dim = size.head_dim if preset(name).model.block == "hstu" else size.width // size.heads
    settings = {
        "width": size.width, "heads": size.heads, "head_dim": head_dim, "blocks": size.blocks, "max_len": size.length,
        "predicts": size.predicts,
    }  # fmt: skip
    config = preset(name, [f"model.{key}={value}" for key, value in settings.items()])
    model = SequentialRecommender(config, items, SPAN)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "bias.position" in path or "bias.time" in path:
                parameter.normal_(0, 0.3)
            elif "delta" in path:
                parameter.normal_()
        if model.pulse is not None:
            _fit(model.pulse)
    _write_catalogue(folder / CATALOGUE, items)
    return Recommender(model, Catalogue.load(folder / CATALOGUE), "cpu")


def exported_of(name: str, kind: str, size: str, keep: Path) -> tuple[Recommender, ExportedModel, float]:
    """A model, what it is exported to, and the seconds that the export took; 0 where `keep` has it already."""
    folder = keep / f"{name}-{size}-{kind}"
    recommender, started = recommender_of(name, folder, ITEMS, SIZES[size]), time.monotonic()
    is_made = (folder / MANIFEST).is_file()
    if not is_made:
        fill(recommender, kind, folder, lambda _: None)
    return recommender, ExportedModel.load(folder), 0.0 if is_made else time.monotonic() - started


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """The rows of a measurement, with where they were measured. Rows of models that were not measured now stay."""
    key = ("size", "model", "format", "what")
    measured = [tuple(row.get(part) for part in key) for row in rows]
    old = json.loads(path.read_text())["rows"] if path.is_file() else []
    kept = [row for row in old if tuple(row.get(part) for part in key) not in measured]
    cpu = next((line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name")), "unknown")
    about = {"environment": {**describe(), "cpu": cpu, "onnxruntime": version("onnxruntime")}, "items": ITEMS}
    commits = describe()["commit"]
    rows = sorted(
        [*kept, *({**row, "commit": commits} for row in rows)],
        key=lambda row: (list(SIZES).index(row["size"]), row["model"]),
    )
    write_json(path, {**about, "rows": rows})


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


def _fit(pulse: torch.nn.Module) -> None:
    """Weights of the size that fits have, and made-up counts."""
    for name, scale in (("everybody", 0.3), ("own", 0.5)):
        pulse.get_buffer(name).normal_(0, scale)
    pulse.get_buffer("network").add_(4)
    pulse.get_buffer("age_unit").fill_(30 * 86_400)
    for name in ("counts", "seasons"):
        pulse.get_buffer(name).exponential_()[..., 0] = 0
    pulse.get_buffer("counted_until").fill_(SPAN[1])


def _write_catalogue(folder: Path, items: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "item_ids.npy"
    np.save(path, np.arange(1, items + 1))
    entry = {"bytes": path.stat().st_size, "sha256": sha256_of(path), "shape": [items]}
    write_json(folder / CATALOGUE_RECORD, seal({"format": FORMAT, "arrays": {"item_ids": entry}}))
