"""Sizes and training that fit the data and the machine, for `trope train DATA` without --model and --config.

The rules are those of the recipes in configs/, which were chosen on validation. Each choice comes with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from trope.data.protocols import MOSTLY_TIED, tied_share
from trope.data.sequences import Sequences

# Users below which wide models overfit: Online Retail's 5,853 and The Complete Journey's 2,469 did.
FEW_USERS = 10_000
# Steps of an epoch from which on the learning rate falls sooner.
LONG_EPOCH = 1_000
CPU_SIZE = ("model.width=64", "model.heads=2", "model.head_dim=32")
_LENGTHS = (50, 100, 200)
_BATCH = 128


class Choice(NamedTuple):
    """Settings as for --set, and why."""

    settings: tuple[str, ...]
    why: str


def choose_sizes(data: Sequences, device: str) -> list[Choice]:
    """What to train with; device: cpu or cuda."""
    chosen = [_width(data, device)]
    counts_U = data.train_end.double()
    counts_U = counts_U[counts_U > 1]
    usual = float(torch.quantile(counts_U[:: max(1, len(counts_U) // 1_000_000)], 0.8)) if len(counts_U) else 0.0
    length = next((each for each in _LENGTHS if usual <= each), _LENGTHS[-1])
    chosen.append(Choice((f"model.max_len={length}",), f"four of five histories have at most {usual:,.0f} events"))
    windows = len(counts_U)
    if float(counts_U.mean()) > length / 2 and float(counts_U.max()) > length:
        chosen.append(Choice((f"train.stride={length}",), "many histories are longer, so all windows train"))
        windows = int((counts_U / length).ceil().sum())
    asks_for_baskets = data.protocol.name in ("holdout", "next-basket")
    if asks_for_baskets and tied_share(data.times.cpu().numpy(), data.offsets.cpu().numpy()) > MOSTLY_TIED:
        chosen.append(Choice(("model.predicts=next-moment",), "most events share their time with another: baskets"))
    if asks_for_baskets:
        chosen.append(Choice(("train.criterion=Recall@10",), "users have several positives"))
    if data.protocol.name == "holdout":
        chosen.append(Choice(("train.refit=true",), "the model is tested as it would be deployed"))
    if windows / _BATCH > LONG_EPOCH:
        schedule = ("train.epochs=20", "train.patience=2", "train.early_stop=6")
        chosen.append(Choice(schedule, f"an epoch has {windows // _BATCH:,} steps"))
    return chosen


def without(chosen: Iterable[Choice], settings: Iterable[str]) -> list[Choice]:
    """The choices that settings of --set leave as they are."""
    own = names(settings)
    kept = [Choice(tuple(each for each in one.settings if not names([each]) & own), one.why) for one in chosen]
    return [choice for choice in kept if choice.settings]


def names(settings: Iterable[str]) -> set[str]:
    """Of settings as for --set, without the values."""
    return {setting.partition("=")[0].strip() for setting in settings}


def _width(data: Sequences, device: str) -> Choice:
    if device == "cpu":
        return Choice(CPU_SIZE, "there is no GPU")
    if data.num_users < FEW_USERS:
        why = f"{data.num_users:,} users are few"
        return Choice(("model.width=128", "model.heads=2", "model.head_dim=64"), why)
    return Choice(("model.width=512", "model.heads=4", "model.head_dim=128"), "the paper's")
