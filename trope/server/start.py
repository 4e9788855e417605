"""What `trope serve` opens before it listens: the store, the models, the application around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trope.online.assignment import ArmOption
from trope.server.app import Options, make_app
from trope.server.gate import Application
from trope.server.logs import Log
from trope.server.open_store import open_store
from trope.server.served import Served
from trope.server.trial import Trial


@dataclass(frozen=True)
class Started:
    """An application, and what there is to say of it. No model: one that was swapped would stay in memory.

    version, users: of the only model, or the control's. arms, exposures: of an experiment.
    """

    app: Application
    version: str
    users: int
    store: str
    arms: str | None = None
    exposures: Path | None = None


def start(
    runs: Mapping[str, ArmOption],
    compare: str | None,
    store: str | Path,
    options: Options,
    log: Log,
    begin: Callable[[Mapping[str, Served]], Trial] | None = None,
) -> Started:
    """Open everything; takes seconds. begin: opens the experiment, if there is one."""
    events = open_store(store)

    def opened(run: str) -> Served:
        return Served.open(run, options.data, events, options.limits.history, options.device)

    models = {name: opened(each.run) for name, each in runs.items()}
    compared = None if compare is None else opened(compare)
    first, *others = [(each.run, models[name]) for name, each in runs.items()]
    others += [] if compare is None or compared is None else [(compare, compared)]
    run, served = first
    for other, model in others:
        if model.catalogue.is_text != served.catalogue.is_text:
            raise ValueError(
                f"the item ids of {other} are of another type than those of {run}; compare runs of one dataset"
            )
    trial = None if begin is None else begin(models)
    app = make_app(models, events, options, log, compared, trial)
    users = 0 if served.known is None else len(served.known)
    if trial is None:
        return Started(app, served.version, users, events.describe())
    arms = ", ".join(f"{name} {share:.1%} {models[name].version}" for name, share in trial.experiment.shares.items())
    return Started(app, served.version, users, events.describe(), arms, trial.exposures.folder)
