"""`Stepper`: one optimiser step after the other, fused into one launch where that is possible.

What a step does depends on (epoch, index, step) alone. `trope.train.loop` runs it with validation and checkpoints,
`trope.train.update` without.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from trope.config import Config
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.models.recommender import SequentialRecommender
from trope.models.sharded_items import Fetched, ShardedItemTable
from trope.train.distributed import Group
from trope.train.divergence import DivergenceGuard
from trope.train.fused import FusedStep
from trope.train.parts import add_up
from trope.train.process import matmul_precision
from trope.train.same_dropout import SameDropout
from trope.train.sharded_step import ShardedStep
from trope.train.step import Feed, Objective, Work, seed_for


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
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
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
        group = self.group
        if self.fused is not None:
            with matmul_precision("high" if self._is_bf16 else "highest"):
                return self.fused(epoch, index, step)
        fetched: list[Fetched] = []
        self.optimizer.zero_grad(set_to_none=True)
        works = self.feed.works(epoch, index, step)
        numbered = zip(self.feed.parts.mine, works, strict=True)
        losses = [partial(self._loss, work, part, step, fetched) for part, work in numbered]
        with matmul_precision("high" if self._is_bf16 else "highest"):
            loss = add_up(losses, self._trained)
        # Every process has made the same model from one seed or checkpoint.
        grads = [p.grad for p in self._trained if p.grad is not None]
        if self.config.train.parts > 1:
            group.sum_by_twos([loss, *grads])
        else:
            loss = group.sum(loss)
            group.sum_all(grads)
        norm = self._update(loss) if self.sharded is None else self.sharded.update(fetched, loss)
        self.loss_sum += loss
        return loss, norm

    def _loss(self, work: Work, part: int, step: int, fetched: list[Fetched]) -> Tensor:
        """The loss of a part of the batch; appends the rows that it fetched."""
        train, device = self.config.train, self.group.device.type
        # One draw of masks for the whole batch. Kernels draw for their own rows, so there each process has its seed;
        # so has each part of `train.parts`, which is the same part for any number of processes.
        is_shared = device == "cpu" and train.parts == 1
        torch.manual_seed(seed_for(train.seed, "dropout", step, 0 if is_shared else part))
        if self.sharded is not None:
            work, rows = self.sharded.fetch(work)
            fetched.append(rows)
        dropout: AbstractContextManager[object] = nullcontext()
        if is_shared and self.group.size > 1:
            dropout = SameDropout(work.first, len(work.batch.items), work.total)
        with dropout, torch.autocast(device, torch.bfloat16, enabled=self._is_bf16):
            loss: Tensor = self.objective(work)
        return loss

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
    """Whether the item table is spread over the processes; a softmax over the whole catalogue needs all of its rows.

    With `train.parts` one process updates its rows as several do, to the same bits.
    """
    return (group.size > 1 or config.train.parts > 1) and config.train.loss == "sampled"
