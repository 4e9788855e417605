"""A batch in parts (`train.parts`), whose gradients are added in an order that depends on no number of processes.

A sum of floats depends on its order, so a batch over four processes has other last digits than in one. Here a batch is
cut into the same P parts for any number of processes, and their gradients are added two by two, and these sums two by
two: (1 + 2) + (3 + 4). P and the number of processes are powers of two, so a process has a branch of that tree. It adds
its own parts here, `Group.sum_by_twos` adds those of the processes, `ShardedItemTable.give_back` those of the items.
Only threads remain, whose number also changes the order of sums: `trope.train.process.threads_for`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trope.config import Config
from trope.train.distributed import Group


class Parts(NamedTuple):
    """How many parts a batch has, and the numbers of those that this process computes."""

    total: int
    mine: range


def parts_of(config: Config, group: Group) -> Parts:
    """One for each process, or those of `train.parts`; ValueError where these cannot be spread."""
    parts, size, rank = config.train.parts, group.size, group.rank
    if parts == 1:
        return Parts(size, range(rank, rank + 1))
    if group.device.type != "cpu":
        raise ValueError(f"train.parts={parts} was not tried on a GPU; set train.parts=1, or take --device cpu")
    if parts % size:
        *others, most = (str(1 << power) for power in range(parts.bit_length()))
        fitting = f"{', '.join(others)} or {most}"
        raise ValueError(f"train.parts={parts} cannot be spread over {size} processes; start {fitting} of them")
    each = parts // size
    return Parts(parts, range(rank * each, (rank + 1) * each))


def for_device(config: Config, device: torch.device) -> Config:
    """The settings of a run on a device that may be another than the run's: without parts where it is no CPU."""
    if device.type == "cpu":
        return config
    return dataclasses.replace(config, train=dataclasses.replace(config.train, parts=1))


def add_up(losses: Sequence[Callable[[], Tensor]], parameters: Sequence[Tensor]) -> Tensor:
    """The sum of losses, of which each is computed when its turn comes; the gradient is in `parameters` afterwards.

    losses: 1, 2, 4 .. of them. parameters: without gradients yet.
    """
    if len(losses) == 1:
        loss = losses[0]()
        loss.backward()
        return loss.detach()
    half = len(losses) // 2
    first = add_up(losses[:half], parameters)
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    second = add_up(losses[half:], parameters)
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
    return first + second
