"""`Stepper`: one optimiser step after the other, fused into one launch where that is possible.

What a step does depends on (epoch, index, step) alone. `trope.train.loop` runs it with validation and checkpoints,
`trope.train.update` without.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trope.config import Config
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.models.recommender import SequentialRecommender
from trope.train.distributed import Group
from trope.train.divergence import DivergenceGuard
from trope.train.fused import FusedStep
from trope.train.process import matmul_precision
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
        if group.size > 1:
            self.objective = DistributedDataParallel(self.objective)
        self.guard = DivergenceGuard(model, group.device, step)
        self.loss_sum = torch.tensor(loss_sum, dtype=torch.float64, device=group.device)
        self.fused: FusedStep | None = None
        if is_fused(config, group):
            self.fused = FusedStep(
                model, data, config, feed, optimizer, self.guard, self.loss_sum, step, self._is_bf16
            )  # fmt: skip

    def __call__(self, epoch: int, index: int, step: int) -> tuple[Tensor, Tensor]:
        """Step number `step`, on batch `index` of an epoch.

        Returns the global batch's loss and its gradient's norm, still on the device.
        """
        train, group = self.config.train, self.group
        if self.fused is not None:
            with matmul_precision("high" if self._is_bf16 else "highest"):
                return self.fused(epoch, index, step)
        torch.manual_seed(seed_for(train.seed, "dropout", step, group.rank))
        work = self.feed(epoch, index, step)
        self.optimizer.zero_grad(set_to_none=True)
        with matmul_precision("high" if self._is_bf16 else "highest"):
            with torch.autocast(group.device.type, torch.bfloat16, enabled=self._is_bf16):
                loss = self.objective(work)
            # DDP takes the mean of the processes' gradients; each has a part of the global mean: the sum is wanted.
            (loss * group.size).backward()
        loss = group.sum(loss.detach())
        norm = self.guard(loss)
        if train.clip > 0:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), train.clip, norm)
        self.optimizer.step()
        self.loss_sum += loss
        return loss, norm

    def rates_changed(self) -> None:
        """Take over the optimiser's learning rates."""
        if self.fused is not None:
            self.fused.learning_rate_changed()

    @property
    def _is_bf16(self) -> bool:
        precision = self.config.train.precision
        return precision == "bf16" or (precision == "auto" and self.group.device.type == "cuda")


def is_fused(config: Config, group: Group) -> bool:
    """Whether steps are fused into one launch: on one GPU, and not against the whole catalogue."""
    return group.device.type == "cuda" and group.size == 1 and config.train.loss == "sampled"
