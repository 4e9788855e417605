"""The item table's part of a step where its rows are spread over processes.

Before the forward pass, the batch's rows are fetched and its items numbered as in their table. After the backward pass,
the rows' gradients go back and every process updates its own rows, with the norm of the gradient of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trope.config import Config
from trope.kernels.adamw import factors_of
from trope.kernels.table import InputEntries
from trope.models.recommender import SequentialRecommender
from trope.models.sharded_items import Fetched, ShardedItemTable
from trope.train.distributed import Group
from trope.train.divergence import DivergenceGuard
from trope.train.optimizer import table_hyper, table_rate
from trope.train.step import Work


class ShardedStep:
    """Fetches rows and updates them.

    Args:
        model: with a `ShardedItemTable`; the optimiser's moments of its rows are updated here.
        step: steps done before.
    """

    def __init__(
        self,
        model: SequentialRecommender,
        config: Config,
        optimizer: torch.optim.Optimizer,
        guard: DivergenceGuard,
        group: Group,
        step: int,
    ) -> None:
        assert isinstance(model.items, ShardedItemTable)
        self.model, self.table, self.clip = model, model.items, config.train.clip
        self.optimizer, self.guard, self.group = optimizer, guard, group
        self.by_twos = config.train.parts > 1
        # With a largest norm the optimiser updates the rows as any parameter. Not with parts, because torch's fused
        # AdamW rounds the last few numbers of a tensor in another way, and which are last depends on the shards.
        holds_moments = self.clip == 0 or self.by_twos
        self.hyper = table_hyper(optimizer, self.table.weight, step, holds_moments)
        # The update writes unit vectors for the fused step. Nobody reads these, so they may be short.
        self.unit_VE = self.table.unit_copy(torch.bfloat16) if holds_moments else None

    def fetch(self, work: Work) -> tuple[Work, Fetched]:
        """A process's part of a batch with its items numbered as in a table of their own, and that table."""
        batch, negatives = work.batch, [] if work.negatives is None else [work.negatives]
        found = self.table.fetch(batch.items, batch.targets, *negatives)
        items, targets, *numbered = found.items
        batch = batch._replace(items=items, targets=targets)
        return work._replace(batch=batch, negatives=numbered[0] if numbered else None, table=found.table), found

    def update(self, fetched: Sequence[Fetched], loss: Tensor) -> Tensor:
        """AdamW for everything, after the backward passes; returns the gradient's norm.

        fetched: for each part of this process. loss: of the global batch, summed over processes.
        """
        table = self.table
        scores, inputs = table.give_back(fetched, self.by_twos)
        if self.unit_VE is None:  # needs the norm of everything before anything moves
            table.weight.grad = table.gradient(scores, inputs)
            norm = self._norm(loss, self.group.sum(table.weight.grad.square().sum()))
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.clip, norm)
            self.optimizer.step()
            return norm
        clipped = self._clip_by_twos(loss, inputs) if self.by_twos else None
        self.hyper[5] += 1
        state = self.optimizer.state[table.weight]
        moments = (state["exp_avg"], state["exp_avg_sq"])
        norm_sq = table.update(moments, self.unit_VE, scores, inputs, factors_of(self.hyper))
        norm = self._norm(loss, self.group.sum(norm_sq.sum())) if clipped is None else clipped
        self.optimizer.step()
        return norm

    def _clip_by_twos(self, loss: Tensor, inputs: InputEntries) -> Tensor:
        """The gradient's norm, the same for any number of processes; gradients are clipped in place where they are."""
        grad_GE = inputs.grad_TE
        assert grad_GE is not None  # each row once
        norm = self._norm(loss, self.group.sum_exactly(grad_GE.square().sum(1)))
        if self.clip > 0:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.clip, norm)
            grad_GE.mul_((self.clip / (norm + 1e-6)).clamp(max=1))  # as torch does
        return norm

    def _norm(self, loss: Tensor, norm_sq: Tensor) -> Tensor:
        return self.guard(loss, {id(self.table.weight): norm_sq.sqrt()})

    def rates_changed(self) -> None:
        """Take over the optimiser's learning rate of the table."""
        self.hyper[0] = table_rate(self.optimizer, self.table.weight)
