"""A note for moments long after the training data."""

from __future__ import annotations

from trope.times import DAY, say_minute, say_roughly

LONG_SHARE, LONG_MOST = 0.1, 60 * DAY
"""A moment is long after the training data past this share of their time span, or past 60 days if that is shorter:
docs/results.md, "A stale model", measures what 60 days cost."""


def long_after(time_span: tuple[int, int], t_now: int) -> str | None:
    """A note where `t_now` lies long after the training data (LONG_SHARE, LONG_MOST), else None.

    time_span: first and last time of the training events.
    """
    first, last = time_span
    if t_now - last <= min(LONG_SHARE * (last - first), LONG_MOST):
        return None
    return (
        f"{say_minute(t_now)} lies {say_roughly(t_now - last)} after the last training event ({say_minute(last)}): the "
        "model knows nothing of what became popular since; train again on newer events"
    )
