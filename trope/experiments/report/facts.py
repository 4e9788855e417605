"""What a reader must know to believe a number: data, protocol, choice of epoch, seeds, settings, machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from trope.data.protocols import Protocol
from trope.evaluate import saved_ranks
from trope.experiments.train_many import Trained
from trope.times import say_duration, say_minute

_PROTOCOLS = {
    "loo-strict": "the last event of each user is the test, the one before it validation",
    "loo-paper": "the last event of each user is validation and test alike, as in the public code base",
    "holdout": "everything after a moment is the test, every event in the window a positive",
    "next-basket": "the last basket of each user is the test, the one before it validation",
}
_FILTERS = {
    "none": "nothing is left out of the ranking",
    "window": "items in the history that the model sees are left out of the ranking",
    "history": "all items of the user's history are left out of the ranking",
}


class Ranked(NamedTuple):
    """Whom the test asked about: users, and their positives in all."""

    users: int
    positives: int

    @property
    def hit(self) -> str:
        """HR where every user has one positive; Recall where some have several (for one they are the same)."""
        return "HR" if self.users == self.positives else "Recall"


def ranked(trained: Trained) -> Ranked:
    """From the first finished run; all of them ranked the same positives."""
    run = next(run for run in trained.runs if run.is_finished)
    result, _ = saved_ranks.load(run.folder, "test")
    return Ranked(len(result.users), len(result.ranks))


def facts(trained: Trained, common: Sequence[str], resamples: int) -> list[tuple[str, str]]:
    """Everything besides the tables."""
    data, asked, source = trained.data, ranked(trained), trained.data.meta["source"]
    counts = f"{data.num_users:,} users, {data.num_items:,} items, {data.num_events:,} events"
    seeds = sorted({run.seed for run in trained.runs})
    filters = sorted({line["filter_seen"] for line in trained.lines})
    criteria = " or ".join(dict.fromkeys(run.config.train.criterion for run in trained.runs))
    several = "one positive each" if asked.hit == "HR" else f"{asked.positives / asked.users:.1f} positives each"
    return [
        ("Dataset", f"{data.path.name}, from {source['name']}: {counts}; checksum {data.meta['checksum'][:12]}"),
        ("Protocol", f"{data.protocol.name}: {_PROTOCOLS[data.protocol.name]}{_window(data.protocol)}"),
        ("Tested on", f"{asked.users:,} users, {several}, ranked in the full catalogue; ties count as their mean"),
        ("filter_seen", "; ".join(f"{name}: {_FILTERS[name]}" for name in filters)),
        ("Choice of epoch", choice(data.protocol, criteria, any(line.get("refit", False) for line in trained.lines))),
        (
            "Seeds",
            f"{', '.join(map(str, seeds))}; {len(trained.lines)} of {len(trained.runs)} runs are finished. Models draw "
            "different numbers from one seed, so two of them do not start from the same weights",
        ),
        ("Settings of all", ", ".join(common) or "the presets' own"),
        (
            "Intervals",
            f"95 %, paired bootstrap over users, {resamples:,} resamples, of metrics averaged over seeds first: they "
            "say how far another draw of users would move a difference, not another training",
        ),
        *_machines(trained.lines),
    ]  # fmt: skip


def choice(protocol: Protocol, criterion: str, is_refit: bool = False) -> str:
    """Who decided which epoch is tested."""
    text = f"the best validation {criterion} chose each run's epoch, and the test was read once, by "
    text += (
        "a model trained anew for as many epochs on training and validation events (train.refit)"
        if is_refit
        else "that model"
    )
    if protocol.name == "loo-paper":
        text += "; with loo-paper validation is the test event, so the choice has seen it"
    return text


def _window(protocol: Protocol) -> str:
    if protocol.cutoff is None or protocol.window is None:
        return ""
    start = say_minute(protocol.cutoff)
    return f"; the test begins {start} and lasts {say_duration(protocol.window)}, validation is the window before it"


def _machines(lines: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Each value that the runs' environments have, most often one."""
    labels = {
        "Device": ("device",), "Versions": ("trope", "torch", "triton", "cuda", "python"), "Commit": ("commit",),
        "Date": ("date",),
    }  # fmt: skip
    found = []
    for label, keys in labels.items():
        texts = []
        for line in lines:
            values = [line["environment"].get(key, "unknown") for key in keys]
            text = (
                ", ".join(f"{key} {value}" for key, value in zip(keys, values, strict=True))
                if len(keys) > 1
                else values[0]
            )
            if text not in texts:
                texts.append(text)
        found.append((label, "; ".join(texts)))
    if any(line["environment"].get("commit", "").endswith("+") for line in lines):
        found.append(("+", "behind a commit: the working tree had changes that are not in it"))
    return found
