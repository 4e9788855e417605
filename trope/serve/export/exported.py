"""`ExportedModel`: an exported folder, checked and loaded, that answers as `Recommender` does.

    exported = ExportedModel.load("exported/grocery")
    exported.recommend(events, t_now="2017-12-20T18:00:00Z", k=10)

It is the reference for other runtimes: what it does with the programs is what they must do.

Shape letters: B histories, L events, G pending events, M moments, E width, V items.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trope.config import Config
from trope.data.catalogue import Catalogue
from trope.models.items import EPS
from trope.models.kept import Events
from trope.models.pulse import Pulse
from trope.models.recommender import SequentialRecommender
from trope.models.tensors import read_tensors
from trope.runs import CATALOGUE
from trope.serve.export import formats
from trope.serve.export.manifest import PULSE_FILE, TABLE, TABLE_FILE, Manifest, read_manifest
from trope.serve.recommender import Recommender


class ExportedNetwork(nn.Module):
    """The programs, with the part of `SequentialRecommender` that a `Recommender` asks for.

    Args:
        runs: the loaded programs by name.
        table_VE: the item table, row 0 zero.
        config, time_span: of the model.
        pulse: where the model has a fitted one.
    """

    def __init__(
        self, runs: Mapping[str, formats.Run], table_VE: Tensor, config: Config, time_span: tuple[int, int],
        pulse: Pulse | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.runs, self.config, self.time_span = dict(runs), config, time_span
        self.register_buffer("table", table_VE)
        self.pulse = pulse

    @property
    def num_items(self) -> int:
        """V, the size of the catalogue."""
        return len(self.get_buffer("table")) - 1

    @property
    def looks_later(self) -> bool:
        """As in `SequentialRecommender`."""
        return self.config.model.predicts == "next-moment"

    @property
    def can_remember(self) -> bool:
        """Whether there are programs to remember and look, or only one that encodes anew for each moment."""
        return "remember" in self.runs

    def item_vectors(self) -> Tensor:
        """Unit vectors of all items, float32 [V + 1, E]."""
        return F.normalize(self.get_buffer("table"), dim=-1, eps=EPS)

    def remember(self, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor) -> ExportedMemory:
        """Encode histories once, for any moment."""
        return ExportedMemory(self, items_BL, times_BL, lengths_B)

    def encode_last(self, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor, t_now_B: Tensor) -> Tensor:
        """What `SequentialRecommender.encode_last` gives, [B, E]."""
        history = at_least_two(items_BL, times_BL, lengths_B)
        return self.runs["encode"](self.get_buffer("table"), *history, t_now_B)


class ExportedMemory:
    """Histories that the program `remember` has encoded; arguments as in `SequentialRecommender.remember`."""

    def __init__(self, network: ExportedNetwork, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor) -> None:
        self.network, self.history = network, at_least_two(items_BL, times_BL, lengths_B)
        self.kept = network.runs["remember"](network.get_buffer("table"), *self.history)
        self.pending_BG = pending_places(*self.history[1:]) if network.looks_later else (lengths_B - 1)[:, None]

    def __len__(self) -> int:
        return len(self.pending_BG)

    @property
    def events(self) -> Events:
        """The histories, as `Memory.events`."""
        return Events.copy_of(*self.history)

    def look(self, moments: Tensor) -> Tensor:
        """Unit vectors at moments [B, M], or [M] for all histories: float32 [B, M, E]."""
        moments_BM = moments.expand(len(self), -1).contiguous()
        table_VE = self.network.get_buffer("table")
        return self.network.runs["look"](table_VE, self.kept, *self.history, self.pending_BG, moments_BM)


class ExportedModel(Recommender):
    """A `Recommender` whose network is the programs of an exported folder."""

    manifest: Manifest

    @classmethod
    def load(cls, folder: str | Path) -> ExportedModel:
        """Check every file of the folder against its SHA-256, and load the programs.

        Loading a folder of format torch or aoti can run code that is in it (`trope.serve.export.formats`).
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        table_VE = _tensors(folder / TABLE_FILE)[TABLE]
        if list(table_VE.shape) != [manifest.num_items + 1, manifest.config.model.width]:
            raise ValueError(f"{folder / TABLE_FILE} is of another model: its shape is {list(table_VE.shape)}")
        pulse = None
        if manifest.turning is not None:
            pulse = Pulse(manifest.num_items, manifest.turning, manifest.time_span, manifest.age_from)
            pulse.load_state_dict(_tensors(folder / PULSE_FILE))
        runs = {name: formats.load(folder / file, manifest.kind) for name, file in manifest.programs.items()}
        network = ExportedNetwork(runs, table_VE, manifest.config, manifest.time_span, pulse)
        # It has what a Recommender asks of a model; the rest of that class is about training.
        found = cls(cast(SequentialRecommender, network), Catalogue.load(folder / CATALOGUE), "cpu")
        found.manifest = manifest
        return found


def at_least_two(items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The histories with at least two columns, which programs need; padding is item 0 at the last time."""
    if items_BL.shape[1] > 1:
        return items_BL, times_BL, lengths_B
    return F.pad(items_BL, (0, 1)), torch.cat((times_BL, times_BL), dim=1), lengths_B


def pending_places(times_BL: Tensor, lengths_B: Tensor) -> Tensor:
    """Places of the events that share the last time, int64 [B, G], right-padded with each history's last place."""
    settled_B = torch.from_numpy(Events.copy_of(times_BL, times_BL, lengths_B).settled_counts(looks_later=True))
    group = torch.arange(int((lengths_B - settled_B).max()))
    return torch.minimum(settled_B[:, None] + group, lengths_B[:, None] - 1)


def _tensors(path: Path) -> dict[str, Tensor]:
    import safetensors

    try:
        return read_tensors(path, None)  # its SHA-256 was compared with the manifest's
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {error}; export the model again") from None
