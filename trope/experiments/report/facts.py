"""How the numbers of a report were measured: data, protocol, choice of epoch, seeds, settings, machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from trope.data.protocols import Protocol
from trope.evaluate import saved_ranks
from trope.experiments.train_many import Trained
from trope.times import say_duration, say_minute

_PROTOCOLS = {
    "loo-strict": "the last event of each user is the test, the one before it validation",
    "loo-paper": "the last event of each user is both validation and test, as in the public code base",
    "holdout": "every event in the window after the cutoff is a positive of the test",
    "next-basket": "the last basket of each user is the test, the one before it validation",
}
_FILTERS = {
    "none": "the ranking has every item",
    "window": "the ranking leaves out the items of the history that the model sees",
    "history": "the ranking leaves out all items of the user's history",
}


class Ranked(NamedTuple):
    """The size of the test: users, and the positives of all users."""

    users: int
    positives: int

    @property
    def hit(self) -> str:
        """HR where every user has one positive, else Recall; with one positive they are the same number."""
        return "HR" if self.users == self.positives else "Recall"


def ranked(trained: Trained) -> Ranked:
    """The size of the test, from the first finished run: all runs ranked the same positives."""
    run = next(run for run in trained.runs if run.is_finished)
    result, _ = saved_ranks.load(run.folder, "test")
    return Ranked(len(result.users), len(result.ranks))


def facts(trained: Trained, common: Sequence[str], resamples: int) -> list[tuple[str, str]]:
    """Label and sentence of each fact."""
    data, asked, source = trained.data, ranked(trained), trained.data.meta["source"]
    counts = f"{data.num_users:,} users, {data.num_items:,} items, {data.num_events:,} events"
    seeds = sorted({run.seed for run in trained.runs})
    filters = sorted({line["filter_seen"] for line in trained.lines})
    criteria = " or ".join(dict.fromkeys(run.config.train.criterion for run in trained.runs))
    is_refit = any(line.get("refit", False) for line in trained.lines)
    has_pulse = any(run.config.model.pulse for run in trained.runs)
    several = "one positive each" if asked.hit == "HR" else f"{asked.positives / asked.users:.1f} positives each"
    return [
        ("Dataset", f"{data.path.name}, from {source['name']}: {counts}; checksum {data.meta['checksum'][:12]}"),
        ("Protocol", f"{data.protocol.name}: {_PROTOCOLS[data.protocol.name]}{_window(data.protocol)}"),
        ("Tested on", f"{asked.users:,} users, {several}, ranked in the full catalogue; ties get their mean rank"),
        ("filter_seen", "; ".join(f"{name}: {_FILTERS[name]}" for name in filters)),
        ("Choice of epoch", choice(data.protocol, criteria, is_refit, has_pulse)),
        (
            "Seeds",
            f"{', '.join(map(str, seeds))}; {len(trained.lines)} of {len(trained.runs)} runs are finished. Two models "
            "with the same seed do not start from the same weights",
        ),
        ("Settings of all models", ", ".join(common) or "none besides the presets"),
        (
            "Intervals",
            f"95 %, by paired bootstrap over users with {resamples:,} resamples, after averaging over seeds. They say "
            "how much a difference would change with other users. They do not say how much it would change with "
            "another training",
        ),
        *_machines(trained.lines),
    ]  # fmt: skip


def choice(protocol: Protocol, criterion: str, is_refit: bool = False, has_pulse: bool = False) -> str:
    """How the tested epoch was chosen. has_pulse: some of the models have one."""
    text = f"validation {criterion} chose each run's epoch; the test was read once, by "
    text += (
        "a model that was trained again, for as many epochs, on training and validation events (train.refit)"
        if is_refit
        else "that model"
    )
    if protocol.name == "loo-paper":
        text += ". Under loo-paper the validation event is the test event, so the test chose the epoch"
        text += ". Models with a pulse validate on the event before it instead" if has_pulse else ""
    return text


def _window(protocol: Protocol) -> str:
    if protocol.cutoff is None or protocol.window is None:
        return ""
    start = say_minute(protocol.cutoff)
    return f"; the test begins {start} and lasts {say_duration(protocol.window)}; validation is the window before it"


def _machines(lines: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Device, versions, commit and date, each with all values that the runs have."""
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
        found.append(("+", "after a commit: the working tree had changes that were not committed"))
    return found
