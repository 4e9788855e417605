"""Write the exported folder of a run: whole, compared with the model, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trope.atomic import atomic_folder, one_line_if_full
from trope.evaluate.evaluation import fitted_pulse
from trope.models.tensors import write_tensors
from trope.runs import CATALOGUE
from trope.serve.export import formats
from trope.serve.export.exported import ExportedModel
from trope.serve.export.manifest import PULSE_FILE, TABLE, TABLE_FILE, write_manifest
from trope.serve.export.parity import TOLERANCE, Parity, compare
from trope.serve.export.programs import programs_of
from trope.serve.recommender import Recommender


def export(run: Path, kind: str, out: Path, say: Callable[[str], None] = lambda _: None) -> Parity:
    """Export the best model of a run; `out` appears only when its answers are the model's.

    Args:
        kind: aoti, onnx or torch; see `trope.serve.export.formats`.
        out: must not exist, or be empty.
        say: told what is being done.
    """
    formats.check_tools(kind)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder; choose another --out")
    recommender = Recommender.from_pretrained(run, "cpu")
    with one_line_if_full(out), atomic_folder(out) as partial:
        shutil.copytree(run / CATALOGUE, partial / CATALOGUE)
        return fill(recommender, kind, partial, say)


def fill(recommender: Recommender, kind: str, folder: Path, say: Callable[[str], None]) -> Parity:
    """Write everything but the catalogue, which is there, and compare; raises where the answers differ."""
    model, pulse = recommender.model, fitted_pulse(recommender.model)
    programs = programs_of(model)
    for name, program in programs.items():
        say(f"writing the program {name}")
        formats.write(program, kind, folder / f"{name}{formats.SUFFIXES[kind]}")
    with torch.no_grad():
        write_tensors({TABLE: model.items.weight.float()}, folder / TABLE_FILE)
    about: dict[str, Any] = {
        "num_items": model.num_items, "time_span": list(model.time_span), "config": model.config, "pulse": None,
    }  # fmt: skip
    if pulse is not None:
        write_tensors(pulse.state_dict(), folder / PULSE_FILE)
        about["pulse"] = {"file": PULSE_FILE, "turning": pulse.turning, "age_from": pulse.age_from}
    write_manifest(folder, kind, programs, about, {})
    say("comparing with the model")
    parity = compare(recommender, ExportedModel.load(folder))
    if not parity.holds:
        raise ValueError(
            f"the {kind} programs differ from the model: cosines by up to {parity.cosines:.1e}, scores of the top 100 "
            f"by up to {parity.answers:.1e}, and {TOLERANCE:.0e} is allowed; nothing was written, take another format"
        )
    write_manifest(folder, kind, programs, about, {**parity._asdict(), "tolerance": TOLERANCE})
    return parity
