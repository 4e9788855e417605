"""A `Recommender` in a forked process: torch's threads do not survive a fork, and what needs them is refused."""

from __future__ import annotations

import os

import torch


class _Threads:
    """Whether this process was forked from one that had used torch's threads, which do not survive a fork."""

    used = lost = False

    def note_use(self) -> None:
        self.used = True

    def note_fork(self) -> None:
        self.lost = self.lost or self.used


_threads = _Threads()
if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_threads.note_fork)


def note_threads() -> None:
    """Say that this process uses torch's threads from now on."""
    _threads.note_use()


def refuse_fork(device: torch.device) -> None:
    """The first parallel operation of such a child would wait for threads that are not there."""
    if _threads.lost and (device.type == "cuda" or torch.get_num_threads() > 1):
        alone = "" if device.type == "cuda" else ", or call torch.set_num_threads(1) in the child"
        raise ValueError(
            "this process was forked from one with a Recommender: torch's threads do not survive a fork, and ranking "
            f"would hang; start workers with spawn (multiprocessing.get_context('spawn')){alone}"
        )
