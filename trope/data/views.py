"""The same events under other splits: everything as training, what came last as validation, a tick of a replay.

Shapes: U users.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trope.data.recut import all_as_training
from trope.data.sequences import Sequences


def all_training(data: Sequences) -> Sequences:
    """Every event is training: nothing is left to validate or test on."""
    splits = all_as_training(data.offsets)
    return data.with_splits(splits, time_span=_span(data, splits[0]))


def trained_until(data: Sequences, moment: int) -> Sequences:
    """Everything strictly before a moment is training, and nothing is validated or tested."""
    before_U = _before(data, moment)
    return data.with_splits(torch.stack((before_U,) * 4), time_span=_span(data, before_U))


def validated_from(data: Sequences, start: int, end: int) -> Sequences:
    """Everything before `start` is training; what comes before `end` is the validation window of a holdout."""
    past_U, until_U = _before(data, start), _before(data, end)
    protocol = {"name": "holdout", "cutoff": end, "window": end - start}
    splits = torch.stack((past_U, until_U, until_U, until_U))
    return data.with_splits(splits, protocol=protocol, time_span=_span(data, past_U))


def asked_within(data: Sequences, moment: int, until: int) -> Sequences:
    """The same data asked at a later moment of a holdout's validation window; what follows before `until` is asked for.

    Events of the window before `moment` are history.
    """
    cutoff = data.protocol.t_now("test")
    assert cutoff is not None, "only a holdout has a window"
    past_U, ends_U = (torch.minimum(_before(data, each), data.valid_end) for each in (moment, until))
    splits = torch.stack((past_U, ends_U, data.test_start, data.test_end))
    return data.with_splits(splits, protocol={"name": "holdout", "cutoff": cutoff, "window": cutoff - moment})


def asked_at(data: Sequences, start: int, end: int) -> Sequences:
    """A tick: everybody with an event in [start, end) is asked at `start`, and those events are the test.

    All events before `start` are history and training.
    """
    past_U, until_U = _before(data, start), _before(data, end)
    protocol = {"name": "holdout", "cutoff": start, "window": end - start}
    splits = torch.stack((past_U, past_U, past_U, until_U))
    return data.with_splits(splits, protocol=protocol, time_span=_span(data, past_U))


def _before(data: Sequences, moment: int) -> Tensor:
    users = torch.arange(data.num_users, device=data.device)
    return data.count_before(users, moment).to(data.train_end.dtype)


def _span(data: Sequences, ends_U: Tensor) -> dict[str, list[int]]:
    """The entry `time_span` of meta.json if each user's first `ends_U` events are training."""
    return {**data.meta["time_span"], "train": list(data.span_of(ends_U) or data.time_span)}
