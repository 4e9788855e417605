"""Which arm of an experiment a user is in: a salted hash of the user's id, and nothing that has to be stored.

Weighted rendezvous hashing. Each arm draws a number u in (0, 1) for the user from SHA-256 of salt, user and arm. The
arm with the smallest -log(u) / share takes the user, with probability share / (sum of shares). A new arm takes users
from the others; nobody moves between two old arms.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_WRITE_ARM = "write --arm NAME=RUN:SHARE, such as --arm control=runs/a:50"


@dataclass(frozen=True)
class Experiment:
    """Arms and their shares; users are assigned by `arm_of`.

    Args:
        name: letters, digits, "_", "-" and ".".
        arms: name to share, at least two; any positive numbers, only their ratios matter. The first is the control.
        started: Unix seconds; no assignment is earlier.
        salt: two experiments with different salts assign independently.
    """

    name: str
    arms: Mapping[str, float]
    started: int
    salt: str

    def __post_init__(self) -> None:
        check_name(self.name, "an experiment's name")
        for arm, share in self.arms.items():
            check_name(arm, "an arm's name")
            if not (share > 0 and math.isfinite(share)):
                raise ValueError(f"the share of arm {arm} must be a positive number, got {share}; leave the arm out")
        if len(self.arms) < 2:
            raise ValueError(
                f"an experiment needs at least two arms, got {', '.join(self.arms) or 'none'}; for an A/A test give "
                "the same run under two names"
            )
        if not self.salt:
            raise ValueError("the salt is empty; give any text, such as the experiment's name")

    @property
    def shares(self) -> dict[str, float]:
        """Shares that sum to 1, by arm."""
        total = sum(self.arms.values())
        return {arm: share / total for arm, share in self.arms.items()}

    @property
    def control(self) -> str:
        """The first arm."""
        return next(iter(self.arms))

    def arm_of(self, user: str) -> str:
        """The user's arm: the same on every machine and after every restart. Users are compared as text."""
        return min(self.arms, key=lambda arm: -math.log(_uniform(self.salt, user, arm)) / self.arms[arm])


class ArmOption(NamedTuple):
    """One `--arm NAME=RUN:SHARE`; without a share 1.0."""

    name: str
    run: str
    share: float


def read_arm(text: str, *, needs_share: bool = True) -> ArmOption:
    """One `--arm` of a command line; the run may hold colons and equals signs."""
    name, equals, rest = text.partition("=")
    run, colon, share = rest.rpartition(":") if needs_share else (rest, ":", "1")
    if not equals or not colon or not run:
        wanted = _WRITE_ARM if needs_share else "write --arm NAME=RUN, such as --arm control=runs/a"
        raise ValueError(f"--arm {text} is not understood; {wanted}")
    try:
        number = float(share)
    except ValueError:
        raise ValueError(f"--arm {text}: the share must be a number, got {share!r}; {_WRITE_ARM}") from None
    return ArmOption(name, run, number)


def read_arms(texts: list[str], *, needs_share: bool = True) -> list[ArmOption]:
    """Every `--arm` of a command line; a name may come once."""
    found = [read_arm(text, needs_share=needs_share) for text in texts]
    names = [arm.name for arm in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"--arm {twice[0]} is given twice; each arm has a name of its own")
    return found


def check_name(name: str, what: str) -> None:
    """Refuse a name that could not be part of a file's name."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{what} must be 1 to 64 letters, digits, '_', '-' or '.', and begin with no sign; got {name!r}"
        )


def _uniform(salt: str, user: str, arm: str) -> float:
    """A number in (0, 1), from 53 bits of the hash. NUL keeps ("a", "bc") and ("ab", "c") apart."""
    digest = hashlib.sha256("\0".join((salt, user, arm)).encode("utf-8", "surrogatepass")).digest()
    return ((int.from_bytes(digest[:8], "big") >> 11) + 0.5) / (1 << 53)
