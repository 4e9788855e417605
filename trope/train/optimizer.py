"""The optimiser: AdamW for everything, or for everything but the item table's second moment (`train.table_state`).

Shapes: E width, V catalogue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trope.config import Config
from trope.kernels.adamw.reference import adamw
from trope.models.recommender import SequentialRecommender
from trope.rotary import frequency_parameters

BETAS = (0.9, 0.98)  # the paper's
_PIECE = 1 << 26  # most weights at once: what is in between takes memory too


class RowwiseAdamW(torch.optim.AdamW):
    """AdamW, but the second moment of one table [V+1, E] is one number a row: of g squared, the mean over the row.

    The table is in the last group, alone; its moments and step are where AdamW would keep them, and there from the
    start, so that whoever updates the table or reads a checkpoint finds which shape they have.

    Args:
        groups: as AdamW takes them, the table's last.
        options: of AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        (self.table,) = self.param_groups[-1]["params"]
        self.state[self.table] = {
            "step": torch.zeros((), dtype=torch.float64, device=self.table.device),
            "exp_avg": torch.zeros_like(self.table),
            "exp_avg_sq": self.table.new_zeros(len(self.table)),
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of everything that has a gradient."""
        assert closure is None
        grad_VE, self.table.grad = self.table.grad, None  # AdamW passes over what has none
        super().step()
        self.table.grad = grad_VE
        if grad_VE is None:
            return
        group, state = self.param_groups[-1], self.state[self.table]
        state["step"] += 1
        hyper = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], state["step"])
        rows = max(1, _PIECE // self.table.shape[1])
        tensors = (self.table.detach(), state["exp_avg"], state["exp_avg_sq"], grad_VE)
        for part in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
            adamw(*part, *hyper)


def make_optimizer(model: SequentialRecommender, config: Config) -> torch.optim.AdamW:
    """AdamW with the rotary coefficients in a group of their own, without decay: a frequency of 0 is not simpler."""
    train, table = config.train, model.items.weight
    is_rowwise, is_cuda = train.table_state == "row", table.device.type == "cuda"
    frequencies = list(frequency_parameters(model))
    own = {id(parameter) for parameter in (*frequencies, *([table] if is_rowwise else []))}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in own]

    def rate(value: float) -> float | Tensor:  # a captured step reads it from the device
        return torch.tensor(value, device=table.device) if is_cuda else value

    groups: list[dict[str, Any]] = [{"params": rest, "lr": rate(train.lr), "weight_decay": train.weight_decay}]
    if frequencies:
        groups.append({"params": frequencies, "lr": rate(train.lr), "weight_decay": 0.0})
    if is_rowwise:
        groups.append({"params": [table], "lr": rate(train.lr), "weight_decay": train.weight_decay})
    kind = RowwiseAdamW if is_rowwise else torch.optim.AdamW
    return kind(groups, betas=BETAS, fused=True, capturable=is_cuda)


def set_learning_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """One for each of the optimiser's groups."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):  # on a GPU, where a captured step reads it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def table_hyper(optimizer: torch.optim.Optimizer, table: Tensor, step: int, holds_moments: bool) -> Tensor:
    """lr, beta1, beta2, eps, weight decay and step of the item table, on its device, for its fused update.

    holds_moments: the update here moves the table, so the optimiser needs its moments and step; see `hold_moments`.
    """
    group = group_of(optimizer, table)
    beta1, beta2 = group["betas"]
    values = [float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], step]
    hyper = torch.tensor(values, dtype=torch.float64, device=table.device)
    if holds_moments:
        hold_moments(optimizer, table, hyper)
    return hyper


def hold_moments(optimizer: torch.optim.Optimizer, parameter: Tensor, hyper: Tensor) -> None:
    """Give the optimiser moments of a parameter where it has none, and the step as `hyper` counts it."""
    state = optimizer.state[parameter]
    for moment in ("exp_avg", "exp_avg_sq"):
        if moment not in state:
            state[moment] = torch.zeros_like(parameter)
    state["step"] = hyper[5]  # a view: checkpoints find it where AdamW would keep it


def table_rate(optimizer: torch.optim.Optimizer, table: Tensor) -> float:
    """The optimiser's learning rate of the item table."""
    return float(group_of(optimizer, table)["lr"])


def group_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """The optimiser's group that holds a parameter."""
    return next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
