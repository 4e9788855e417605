"""Several processes under torchrun: who am I, which rows are mine, and what do we all agree on."""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from trope.devices import choose_device
from trope.train.silence import limit_silence

T = TypeVar("T")
_INTERFACE = (
    "if that is an address of the machine itself, as 127.0.1.1, its name stands there in /etc/hosts: name its network "
    "card in GLOO_SOCKET_IFNAME"
)
_FAILED = ""  # no JSON
_LARGE = 1 << 22  # numbers of a tensor that is worth a message of its own; not tuned


@dataclass(frozen=True)
class Group:
    """This process among those that train one model.

    store: names and values that all processes see; of several processes alone.
    """

    rank: int
    size: int
    device: torch.device
    store: Store | None = field(default=None, repr=False, compare=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def first_says(self, value: float) -> float:
        """The first process's value, so that all take the same decision."""
        if self.size == 1:
            return value
        box = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.broadcast(box, 0)
        return float(box)

    def largest(self, values: list[int]) -> list[int]:
        """Of each value, the largest that a process has."""
        if self.size == 1:
            return values
        box = torch.tensor(values, device=self.device)
        dist.all_reduce(box, dist.ReduceOp.MAX)
        return box.tolist()

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

    def sum_exactly(self, values_N: torch.Tensor) -> torch.Tensor:
        """The sum of numbers >= 0 that processes have between them, float64: the same for any order and any processes.

        Integers are added, so each value is rounded to 2^-36 of the largest. Not finite where a value is not.
        """
        largest = torch.cat((values_N.new_zeros(1), values_N)).max().double()
        largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a maximum over processes may forget a NaN
        if self.size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        unit = (largest / 2**36).clamp_min(torch.finfo(torch.float64).tiny)
        return self.sum((values_N.double() / unit).round().long().sum()) * unit

    def sum_by_twos(self, tensors: list[torch.Tensor]) -> None:
        """`sum_all` of tensors of one type, added in the order of `trope.train.parts`."""
        if self.size == 1:
            return
        sizes = [tensor.numel() for tensor in tensors]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        flat = F.pad(flat, (0, -len(flat) % self.size))
        rows = flat.view(self.size, -1)
        arrived = torch.empty_like(rows)
        dist.all_to_all_single(arrived, rows)  # what every process has of this one's piece
        while len(arrived) > 1:
            arrived = arrived[0::2] + arrived[1::2]
        dist.all_gather(list(rows), arrived[0])
        for tensor, found in zip(tensors, flat[: sum(sizes)].split(sizes), strict=True):
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
        self.largest([0])

    def first_does(self, work: Callable[[], T]) -> T:
        """What `work` returns in the first process, which alone does it; the others wait for as long as it takes.

        What `work` returns goes through JSON. If it raises, the others raise a ConnectionError.
        """
        if self.size == 1:
            return work()
        assert self.store is not None, "only `process_group` makes groups that can do this"
        name = f"work/{next(self._numbers)}"  # all processes do the same works in the same order
        if self.is_first:
            try:
                result = work()
            except BaseException:
                self.store.set(name, _FAILED)
                raise
            self.store.set(name, json.dumps(result))
        else:
            # Not in a collective, which gives up after minutes. And not in `store.wait`, which keeps to itself the
            # connection that torch's threads beside NCCL may use.
            pause = 0.01
            while not self.store.check([name]):
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
            found = self.store.get(name).decode()
            if found == _FAILED:
                raise ConnectionError("another process was lost: the first one; see its line")
            result = json.loads(found)
        self.wait()  # without torchrun, the store ends with the first process
        return result


@contextmanager
def process_group(device: str) -> Iterator[Group]:
    """The group that torchrun's environment describes, or a group of one.

    device: auto takes a GPU where there is one; under torchrun each process takes its own.
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
    named = PrefixStore(agree_on_name(store, rank, size, default_pg_timeout), store)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    with _lost("processes cannot reach each other", f"; {_INTERFACE}"):
        dist.init_process_group(backend, store=named, rank=rank, world_size=size)
    limit_silence()
    with _lost("another process was lost"):
        yield Group(rank, size, chosen, named)
    # Not after an error: NCCL would wait here for the others, which wait for this process.
    dist.destroy_process_group()


@contextmanager
def _lost(what: str, advice: str = "") -> Iterator[None]:
    """Raise gloo's RuntimeError as a ConnectionError in one line: it names the address where a process has failed."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if "gloo" not in said:
            raise
        said = re.sub(r"\[\S*/gloo/\S*\] ", "", said).split(". This is typically")[0]
        raise ConnectionError(f"{what}: {said}{advice}") from error


def agree_on_name(store: Store, rank: int, size: int, patience: timedelta) -> str:
    """A new name that all processes of this attempt have, through a store that may hold keys of earlier attempts.

    patience: the longest wait for the others.
    """
    # TORCHELASTIC_RESTART_COUNT is no such name: of several machines, only the one whose process died counts.
    mine = secrets.token_hex(8)
    if rank:
        store.set(f"ask/{rank}", mine)
        answer = f"answer/{rank}/{mine}"  # nobody could write it before
        store.wait([answer], patience)
        name = store.get(answer).decode()
        store.set(f"have/{rank}", name)
        return name
    waiting, until = set(range(1, size)), time.monotonic() + patience.total_seconds()
    while waiting:
        for other in sorted(waiting):
            if store.check([f"ask/{other}"]):  # maybe of an earlier attempt: then nobody reads the answer
                store.set(f"answer/{other}/{store.get(f'ask/{other}').decode()}", mine)
            if store.check([f"have/{other}"]) and store.get(f"have/{other}").decode() == mine:
                waiting.remove(other)
        if waiting and time.monotonic() > until:
            raise TimeoutError(f"processes {sorted(waiting)} of {size} did not come within {patience}")
        time.sleep(0.01)
    return mine
