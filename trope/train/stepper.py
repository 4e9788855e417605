"""`Stepper`: one optimiser step after the other, fused into one launch where that is possible.

What a step does depends on (epoch, index, step) alone. `trope.train.loop` runs it with validation and checkpoints,
`trope.train.update` without.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from trope.config import Config
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.models.recommender import SequentialRecommender
from trope.models.sharded_items import ShardedItemTable
from trope.train.distributed import Group
from trope.train.divergence import DivergenceGuard
from trope.train.fused import FusedStep
from trope.train.process import matmul_precision
from trope.train.same_dropout import SameDropout
from trope.train.sharded_step import ShardedStep
from trope.train.step import Feed, Objective, seed_for


class Stepper:
    """Model and optimiser, step by step.

    Args:
        data: on the model's device; `feed` cuts its batches.
        step: steps done before. loss_sum: of the steps of the epoch under way.
    """

    def __init__(
        self,
        model: SequentialRecommender,
        data: Sequences | Stream,
        config: Config,
        feed: Feed,
        optimizer: torch.optim.Optimizer,
        group: Group,
        step: int = 0,
        loss_sum: float = 0.0,
    ) -> None:
        self.model, self.config, self.feed, self.optimizer, self.group = model, config, feed, optimizer, group
        self.objective: nn.Module = Objective(model, config.train.temperature)
        table = model.items.weight if isinstance(model.items, ShardedItemTable) else None
        self.guard = DivergenceGuard(model, group.device, step, also=table)
        self.loss_sum = torch.tensor(loss_sum, dtype=torch.float64, device=group.device)
        self.fused: FusedStep | None = None
        if is_fused(config, group):
            self.fused = FusedStep(
                model, data, config, feed, optimizer, self.guard, self.loss_sum, step, self._is_bf16
            )  # fmt: skip
        self.sharded: ShardedStep | None = None
        if isinstance(model.items, ShardedItemTable):
            self.sharded = ShardedStep(model, config, optimizer, self.guard, group, step)

    def __call__(self, epoch: int, index: int, step: int) -> tuple[Tensor, Tensor]:
        """Step number `step`, on batch `index` of an epoch.

        Returns the global batch's loss and its gradient's norm, still on the device.
        """
        train, group = self.config.train, self.group
        if self.fused is not None:
            with matmul_precision("high" if self._is_bf16 else "highest"):
                return self.fused(epoch, index, step)
        # One draw of masks for the whole batch. Kernels draw for their own rows, so there each process has its seed.
        is_shared = group.device.type == "cpu"
        torch.manual_seed(seed_for(train.seed, "dropout", step, 0 if is_shared else group.rank))
        work, fetched = self.feed(epoch, index, step), None
        if self.sharded is not None:
            work, fetched = self.sharded.fetch(work)
        dropout: AbstractContextManager[object] = nullcontext()
        if is_shared and group.size > 1:
            dropout = SameDropout(work.first, len(work.batch.items), work.total)
        self.optimizer.zero_grad(set_to_none=True)
        with matmul_precision("high" if self._is_bf16 else "highest"):
            with dropout, torch.autocast(group.device.type, torch.bfloat16, enabled=self._is_bf16):
                loss = self.objective(work)
            loss.backward()
        # Each process has its part of the global mean. Every one has made the same model from one seed or checkpoint.
        loss = group.sum(loss.detach())
        group.sum_all([p.grad for p in self.model.parameters() if p.grad is not None])
        if self.sharded is not None and fetched is not None:
            norm = self.sharded.update(fetched, loss)
        else:
            norm = self._update(loss)
        self.loss_sum += loss
        return loss, norm

    def _update(self, loss: Tensor) -> Tensor:
        """AdamW for everything; returns the gradient's norm."""
        norm, clip = self.guard(loss), self.config.train.clip
        if clip > 0:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), clip, norm)
        self.optimizer.step()
        return norm

    def rates_changed(self) -> None:
        """Take over the optimiser's learning rates."""
        if self.fused is not None:
            self.fused.learning_rate_changed()
        if self.sharded is not None:
            self.sharded.rates_changed()

    @property
    def _is_bf16(self) -> bool:
        precision = self.config.train.precision
        return precision == "bf16" or (precision == "auto" and self.group.device.type == "cuda")


def is_fused(config: Config, group: Group) -> bool:
    """Whether steps are fused into one launch: on one GPU, and not against the whole catalogue."""
    return group.device.type == "cuda" and group.size == 1 and config.train.loss == "sampled"


def is_sharded(config: Config, group: Group) -> bool:
    """Whether the item table is spread over the processes; a softmax over the whole catalogue needs all of its rows."""
    return group.size > 1 and config.train.loss == "sampled"
