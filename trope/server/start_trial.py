"""What `trope serve --arm ...` begins with: its options checked before a model is loaded, its folder opened after."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from trope.online.assignment import ArmOption, Experiment, read_arms
from trope.online.exposure_log import ExposureLog
from trope.online.exposures import begin_experiment, read_experiment
from trope.server.served import Served
from trope.server.trial import Trial

EXPOSURES = Path("exposures")
"""Where an experiment's folder is by default."""


def runs_of(
    run: str | None, arms: list[str], experiment: str | None, exposures: Path | None, may_override: bool
) -> dict[str, ArmOption]:
    """The runs to serve by arm, or RUN alone under an empty name; refuses options that do not belong together.

    The control comes first. An experiment that goes on keeps its control, in whatever order a restart names the arms.
    """
    if not arms:
        for option, given in (
            ("--experiment", experiment),
            ("--exposures", exposures),
            ("--allow-override", may_override),
        ):
            if given:
                raise ValueError(f"{option} needs arms; give --arm NAME=RUN:SHARE twice or more instead of RUN")
        if run is None:
            raise ValueError(
                "give a run made by `trope train`, or --arm NAME=RUN:SHARE twice or more for an experiment"
            )
        return {"": ArmOption("", run, 1.0)}
    if run is not None:
        raise ValueError(f"give either RUN or --arm, not both; make {run} an arm: --arm control={run}:SHARE")
    if experiment is None:
        raise ValueError("--arm needs a name for the experiment; give --experiment NAME")
    found = {arm.name: arm for arm in read_arms(arms)}
    # Refuses bad names and shares before models are loaded, which takes seconds.
    Experiment(experiment, {arm.name: arm.share for arm in found.values()}, 0, experiment)
    # By default events are stored in the control's run: with another arm first, they would seem to be lost.
    old = read_experiment(_folder(experiment, exposures))
    if old is not None and old.arms.keys() == found.keys():
        return {arm: found[arm] for arm in old.arms}
    return found


def open_trial(
    name: str,
    exposures: Path | None,
    runs: Mapping[str, ArmOption],
    models: Mapping[str, Served],
    *,
    may_override: bool,
    watch: bool,
) -> Trial:
    """Begin an experiment, or go on with the one in the folder. exposures: by default `EXPOSURES` / name."""
    folder = _folder(name, exposures)
    shares = {arm.name: arm.share for arm in runs.values()}
    versions = {arm: served.version for arm, served in models.items()}
    experiment = begin_experiment(folder, name, shares, int(time.time()), versions)
    log = ExposureLog(folder)
    watched = {arm.name: Path(arm.run) for arm in runs.values()} if watch else {}
    return Trial(experiment, log, may_override, watched)


def _folder(name: str, exposures: Path | None) -> Path:
    return EXPOSURES / name if exposures is None else exposures
