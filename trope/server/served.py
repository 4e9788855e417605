"""`Served`: one model with everything that is live beside it, and the place in the store up to which it has read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from trope.data.folder import sha256_of
from trope.models.pretrained import find_folder, read_config
from trope.runs import BEST, METRICS, WEIGHTS, read_metrics
from trope.serve.recommender import Recommender
from trope.server.dataset import KnownUsers, find_dataset
from trope.server.encoder import Encoder
from trope.server.people import People
from trope.server.popularity import NewItems, Popularity
from trope.server.store import Store
from trope.times import say_minute

_AT_ONCE = 10_000


class Served:
    """A model, its counts and its users' histories. After `open`, one thread uses it.

    Args:
        recommender: the model and its catalogue.
        version: names the weights in every answer.
        known: the dataset's users, where there is a dataset.
        store: followed for new events.
        history: events that a user's history may have.
        fingerprint: of the folder before it was read, see `fingerprint`; None where it had no model.
    """

    def __init__(
        self,
        recommender: Recommender,
        version: str,
        folder: Path,
        known: KnownUsers | None,
        store: Store,
        history: int,
        fingerprint: str | None = None,
    ) -> None:
        self.recommender, self.version, self.folder, self.store = recommender, version, folder, store
        self.fingerprint = fingerprint
        self.catalogue = recommender.catalogue
        self.originals = self.catalogue.item_ids.to_list()  # decoded once; place i is dense item i + 1
        self.known, self.history = known, history
        self._begin()
        self.counted_from = self.popularity.counted_until

    def _begin(self) -> None:
        """What is live, as it is before the first stored event."""
        model = self.recommender.model
        self.popularity = Popularity(model, None if self.known is None else self.known.data)
        self.new_items = NewItems()
        self.encoder = Encoder(model, self.recommender.device)
        self.people = People(self.store, self.catalogue, self.known, self.history, on_let_go=self.encoder.forget)
        self.position = 0

    @classmethod
    def open(cls, source: str | Path, data: Path | None, store: Store, history: int, device: str = "auto") -> Served:
        """Load a run, or a folder with a model and its catalogue, and count the stored events; may take seconds.

        data: the dataset; None looks for the run's own.
        """
        # Symbolic links are followed once: all files are then of one model, also if the link is changed meanwhile.
        folder = find_folder(source).resolve()
        before = fingerprint(folder)
        recommender = Recommender.from_pretrained(folder, device)
        dataset = find_dataset(folder, data)
        known = None if dataset is None else KnownUsers(dataset, recommender.catalogue)
        served = cls(recommender, version_of(folder), folder, known, store, history, before)
        # Nobody's history is in memory yet, so events that the model has counted need not be read.
        last = store.last_position()
        served.follow(served.counted_from)
        served.position = max(served.position, last)
        return served

    def follow(self, since: int = 0) -> int:
        """Read what the store has got since the last time, from this server and from others; returns how much.

        A store that ends before the place we have read to has lost events, which are then forgotten here too: else
        new events would be taken for known ones until as many have come.

        since: events before this time need not be read.
        """
        total, last = 0, self.store.last_position()
        if last < self.position:
            self._begin()
        while self.position < last and (events := self.store.after(self.position, _AT_ONCE, since)):
            self.position = events[-1].position
            total += len(events)
            dense = self.catalogue.dense([event.item for event in events]).tolist()
            # What lies before the end of the model's own counts is in them.
            counted = [(item, e) for item, e in zip(dense, events, strict=True) if e.time >= self.counted_from]
            known = [(item, event.time) for item, event in counted if item]
            self.popularity.add([item for item, _ in known], [time for _, time in known])
            for item, event in counted:
                if not item:
                    self.new_items.add(event.item, event.time)
            for event in events:
                replaced = self.people.add(event)
                if replaced is not None:
                    self.encoder.forget(replaced)
            if len(events) < _AT_ONCE:
                break
        return total

    def name(self, item: int) -> str | None:
        """A dense item's name, where the catalogue has names."""
        return None if self.catalogue.item_names is None else self.catalogue.name_of(item)

    def describe(self) -> dict[str, Any]:
        """What `GET /model` answers."""
        model = self.recommender.model
        return {
            "version": self.version,
            "run": self.folder.name,
            "block": model.config.model.block,
            "rotary": model.config.rotary.kind,
            "width": model.config.model.width,
            "blocks": model.config.model.blocks,
            "max_len": model.config.model.max_len,
            "parameters": sum(x.numel() for x in model.parameters()),
            "items": model.num_items,
            "users_of_dataset": 0 if self.known is None else len(self.known),
            "trained_from": model.time_span[0],
            "trained_until": model.time_span[1],
            "trained_until_text": say_minute(model.time_span[1]),
            "has_pulse": self.popularity.pulse is not None,
            "counted_until": self.counted_from,
            "item_ids_are_text": self.catalogue.is_text,
            "has_names": self.catalogue.item_names is not None,
            "new_items": len(self.new_items),
        }


def version_of(folder: Path) -> str:
    """Twelve digits of the weights' SHA-256, and the epoch they are from where the run says so."""
    model = folder / BEST if (folder / BEST).is_dir() else folder
    digest = read_config(model).sha256 or sha256_of(model / WEIGHTS)
    epoch = f"-e{read_metrics(folder)['best_epoch']}" if (folder / METRICS).is_file() else ""
    return f"{digest[:12]}{epoch}"


def fingerprint(folder: Path) -> str | None:
    """Changes whenever another model is at this path: files are replaced whole, so their identity tells. None where
    there is no model, as between two renames."""
    model = folder / BEST if (folder / BEST).is_dir() else folder
    try:
        stat = (model / WEIGHTS).stat()
    except OSError:
        return None
    return hashlib.sha256(f"{folder.resolve()} {stat.st_ino} {stat.st_mtime_ns} {stat.st_size}".encode()).hexdigest()
