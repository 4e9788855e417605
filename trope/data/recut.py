"""Other cuts of the same events, [4, U] as in `splits.npy`: what a store in memory and a stream do alike.

Shapes: U users.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trope.data.protocols import Protocol


def own_validation(splits_4U: Tensor) -> Tensor:
    """Each user's last event before the test as validation, where a protocol validates on the test."""
    _, _, test_start, test_end = splits_4U
    return torch.stack(((test_start - 1).clamp(min=0), test_start, test_start, test_end))


def validation_as_training(splits_4U: Tensor) -> Tensor:
    """Validation events moved into training; the validation split is then empty."""
    _, valid_end, test_start, test_end = splits_4U
    return torch.stack((valid_end, valid_end, test_start, test_end))


def all_as_training(offsets: Tensor) -> Tensor:
    """Every event is training: nothing is left to validate or test on. offsets: [U + 1]."""
    return torch.stack((offsets.diff().to(torch.int32),) * 4)


def check_refit(path: Path, protocol: Protocol, validates_on_test: bool) -> None:
    """Refuse to train on validation events that are test events."""
    if validates_on_test:
        raise ValueError(
            f"{path} validates on test events (protocol {protocol.name}), so training on validation too would train on "
            "the test; leave train.refit off, or prepare the data with loo-strict or holdout"
        )
