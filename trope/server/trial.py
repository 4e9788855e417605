"""`Trial`: an experiment in one server. Each arm has a model of its own; what is shown is logged as an exposure."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from trope.online.assignment import Experiment
from trope.online.exposure_log import ExposureLog
from trope.online.exposures import Exposure
from trope.server.refusal import Refused
from trope.server.schema import Question
from trope.server.served import Served


@dataclass(frozen=True)
class Trial:
    """The arms of a server.

    Args:
        experiment: assigns users.
        exposures: where what is shown is kept.
        may_override: whether a question may name its arm.
        watch: folders in which to look for new models, by arm.
    """

    experiment: Experiment
    exposures: ExposureLog
    may_override: bool = False
    watch: Mapping[str, Path] = field(default_factory=dict)
    _begin: str = field(default_factory=lambda: secrets.token_hex(6))
    _numbers: count[int] = field(default_factory=count)

    def check(self, questions: Iterable[Question]) -> None:
        """Refuse a question that names an arm without leave, or one that is not there."""
        for question in questions:
            if question.arm is None:
                continue
            if not self.may_override:
                raise Refused("arm is for tests; start the server with --allow-override to choose it")
            self.check_arm(question.arm)

    def check_arm(self, arm: Any) -> str:
        """The name of an arm of this experiment."""
        if not isinstance(arm, str) or arm not in self.experiment.shares:
            raise Refused(f"there is no arm {ascii(arm)[:60]}; the arms are {', '.join(self.experiment.shares)}")
        return arm

    def arm_of(self, question: Question) -> str:
        """Who answers: the arm that the question names, the user's own, or the control for a history without a user."""
        if question.arm is not None:
            return question.arm
        return self.experiment.control if question.user is None else self.experiment.arm_of(question.user)

    def sign(self, question: Question, said: dict[str, Any], *, is_shown: bool) -> None:
        """Write arm and request id into an answer, and log it if it is shown to a user.

        A question with several moments is a preview: nobody is shown all of its lists.
        """
        said["arm"], said["request_id"] = self.arm_of(question), f"{self._begin}-{next(self._numbers)}"
        if not is_shown or question.user is None or len(question.moments) != 1:
            return
        answered, is_forced = time.time(), question.arm is not None
        (part,) = said.get("moments", (said,))
        row = Exposure(
            said["request_id"], self.experiment.name, question.user, said["arm"], part["moment"], answered,
            [str(entry["item_id"]) for entry in part["items"]], said["model"], is_forced,
        )  # fmt: skip
        self.exposures.add([row])

    def describe(self, models: Mapping[str, Served]) -> dict[str, Any]:
        """For `GET /model`. models: those that are served now."""
        shares = self.experiment.shares
        return {
            "name": self.experiment.name,
            "started": self.experiment.started,
            "arms": {arm: {"share": shares[arm], **served.describe()} for arm, served in models.items()},
            "exposures": str(self.exposures.folder),
            "exposures_failure": self.exposures.failure,
            "may_override": self.may_override,
        }
