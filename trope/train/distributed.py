"""Several processes under torchrun: who am I, which rows are mine, and what do we all agree on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from trope.environment import choose_device

_LARGE = 1 << 22  # numbers of a tensor that is worth a message of its own; not tuned


@dataclass(frozen=True)
class Group:
    """This process among those that train one model."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def part(self, rows: int) -> tuple[int, int]:
        """This process's rows of a global batch: from the first until before the last, maybe none."""
        return rows * self.rank // self.size, rows * (self.rank + 1) // self.size

    def first_says(self, value: float) -> float:
        """The first process's value, so that all take the same decision."""
        if self.size == 1:
            return value
        box = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.broadcast(box, 0)
        return float(box)

    def largest(self, value: int) -> int:
        """The largest of all processes' values."""
        if self.size == 1:
            return value
        box = torch.tensor(value, device=self.device)
        dist.all_reduce(box, dist.ReduceOp.MAX)
        return int(box)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of all processes' values, without waiting for it."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def sum_all(self, tensors: list[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all processes. Small ones travel together."""
        if self.size == 1:
            return
        together: list[torch.Tensor] = []
        for tensor in tensors:
            if tensor.numel() >= _LARGE:
                dist.all_reduce(tensor)
            else:
                together.append(tensor)
        if together:
            sums = torch.cat([tensor.reshape(-1) for tensor in together])
            dist.all_reduce(sums)
            for tensor, found in zip(together, sums.split([each.numel() for each in together]), strict=True):
                tensor.copy_(found.view_as(tensor))

    def gather_bytes(self, value: bytes) -> list[bytes]:
        """All processes' values, which are of one length, in the order of the ranks."""
        if self.size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(value), dtype=torch.uint8).to(self.device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine)
        return [bytes(each.tolist()) for each in found]

    def wait(self) -> None:
        """Until every process is here."""
        self.largest(0)


@contextmanager
def process_group(device: str, patience: timedelta | None = None) -> Iterator[Group]:
    """The group that torchrun's environment describes, or a group of one.

    device: auto takes a GPU where there is one; under torchrun each process takes its own.
    patience: the longest wait for another process; None for torch's own, ten minutes on GPUs and thirty on CPUs. It is
        torchrun that notices a process which died.
    """
    chosen = choose_device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Group(0, 1, chosen)
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(chosen)
    store, rank, size = next(rendezvous("env://"))
    # torchrun keeps one store for all restarts. Without a name of their own, restarted processes would find the
    # addresses of those that died.
    attempt = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} of {size} processes"
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    named = PrefixStore(attempt, store)
    dist.init_process_group(backend, store=named, rank=rank, world_size=size, timeout=patience)
    try:
        yield Group(rank, size, chosen)
    finally:
        dist.destroy_process_group()
