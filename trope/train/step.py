"""One optimiser step without waiting for the device: cut a batch, draw its negatives, compute its loss.

Everything random is seeded from what it is for (the run's seed, the purpose, the step), never from what was drawn
before. A run resumed at some step therefore draws exactly what it would have drawn, and so does each of several
processes, which take their rows of one global batch and of one draw of negatives.

Shapes: B batch (a part's rows), L positions, T valid positions, E width, V catalogue, W training windows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trope.config import Config
from trope.data.next_moments import next_moments
from trope.data.sequences import Batch, Sequences
from trope.data.windows import Windows
from trope.kernels.batch import Source
from trope.models.items import ItemTable
from trope.models.recommender import SequentialRecommender
from trope.train.balance import token_part
from trope.train.distributed import Group
from trope.train.loss import draw_negatives, token_losses
from trope.train.parts import parts_of

PIECE = 1 << 16  # tokens whose negatives are drawn together; all of a batch of 128 histories of 512 events


def seed_for(seed: int, purpose: str, *numbers: int) -> int:
    """A seed for one purpose at one moment of a run, unrelated to that of any other."""
    digest = hashlib.blake2b(repr((seed, purpose, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class NothingToLearn(ValueError):
    """There is no window with a new event as a target."""


class Work(NamedTuple):
    """A part of a global batch."""

    batch: Batch
    places_T: Tensor  # the valid positions as indices into the flattened [B, L]
    negatives: Tensor | None  # see `draw_negatives`
    share: float  # one over the targets of the global batch; 0 where this part has no row of it
    first: int = 0  # the number of its first row in the global batch
    total: int = 0  # rows of the global batch; both are needed where there are several processes
    table: ItemTable | None = None  # which items, targets and negatives are numbered in; None: the model's own


class Feed:
    """Training batches by number.

    fresh_N: [N] bool, for an update: which events are to be learned. An epoch is then all windows with such a target,
        and as many others, drawn anew each epoch. Without it an epoch is all windows of `train.stride`.
    """

    def __init__(self, data: Sequences, config: Config, group: Group, fresh_N: Tensor | None = None) -> None:
        self.data, self.config, self.parts = data, config, parts_of(config, group)
        self.moments = next_moments(data) if config.model.predicts == "next-moment" else None
        lengths_U = None if self.moments is None else self.moments.inputs + 1  # a window's last event is no input
        max_len = config.model.max_len
        # Windows that do not overlap: each new event is learned once an epoch.
        self.windows = data.train_windows(max_len, config.train.stride if fresh_N is None else max_len, lengths_U)
        # On the host too: how many targets a batch has must be known without asking the device.
        self._lengths_W = (self.windows.ends - self.windows.starts - 1).cpu()
        if not len(self._lengths_W):
            what = "training events" if self.moments is None else "moments to train on"
            raise ValueError(f"{data.path} has no user with two {what}; nothing can be learned from it")
        self._fresh_W = None if fresh_N is None else self._has_target(fresh_N).cpu()
        self.size = len(self._lengths_W)
        if self._fresh_W is not None:
            fresh = int(self._fresh_W.sum())
            if not fresh:
                raise NothingToLearn(
                    f"{data.path} has no new event that follows another one; there is nothing to learn"
                )
            self.size = min(2 * fresh, self.size)
        self.steps = math.ceil(self.size / config.train.batch)
        self._generator = torch.Generator(data.device)
        self.following: Tensor | None = None  # the target of each event in this epoch, where it is not the next
        self._epoch = -1

    def order(self, epoch: int) -> Tensor:
        """The epoch's windows in the order in which they are trained on, on the device."""
        if epoch != self._epoch:
            self._shuffle(epoch)
        return self._order

    def tokens(self, epoch: int, index: int) -> int:
        """How many targets batch `index` of an epoch has."""
        self.order(epoch)
        return self._tokens[index]

    def rows(self, epoch: int, index: int) -> tuple[Sequences, Windows, Tensor]:
        """The store to cut batch `index` from, its windows, and how many targets each has, on the host."""
        self.order(epoch)
        chosen = slice(index * self.config.train.batch, (index + 1) * self.config.train.batch)
        return self.data, self.windows.take(self._order[chosen]), self._ordered_lengths_W[chosen]

    def __call__(self, epoch: int, index: int, step: int) -> Work:
        """Batch `index` of an epoch, where it is one part for this process; `step` counts through all epochs."""
        (work,) = self.works(epoch, index, step)
        return work

    def works(self, epoch: int, index: int, step: int) -> list[Work]:
        """This process's parts of batch `index` of an epoch."""
        train, max_len = self.config.train, self.config.model.max_len
        data, windows, lengths = self.rows(epoch, index)
        ends, total = lengths.cumsum(0).tolist(), len(lengths)
        works, tokens = [], []
        for part in self.parts.mine:
            first, last = token_part(ends, part, self.parts.total)
            share = 1 / ends[-1]
            if first == last:
                # Gradients are added up over all parts: compute some row, and let it count nothing.
                first, last, share = 0, 1, 0.0
            tokens.append(slice(ends[first] - int(lengths[first]), ends[last - 1]))
            batch = self._cut(data, Windows(windows.starts[first:last], windows.ends[first:last]))
            places_T = _valid_places(batch.lengths, tokens[-1].stop - tokens[-1].start, max_len)
            works.append(Work(batch, places_T, None, share, first, total))
        if train.loss == "full":
            return works
        # Negatives are drawn as for the global batch, from its unique items too, and each part keeps its own rows.
        if len(works) == self.parts.total:
            found = [work.batch.targets.flatten()[work.places_T] for work in works if work.share]
            targets_T = found[0] if len(found) == 1 else torch.cat(found)
        elif train.negative_source == "batch":
            whole = self._cut(data, windows)
            targets_T = whole.targets.flatten()[_valid_places(whole.lengths, ends[-1], max_len)]
        else:  # only their number counts
            targets_T = works[0].batch.targets.new_zeros(1).expand(ends[-1])
        drawn = self._draw(targets_T, data.num_items, tokens, step)
        return [work._replace(negatives=found) for work, found in zip(works, drawn, strict=True)]

    def _draw(self, targets_T: Tensor, num_items: int, parts: Sequence[slice], step: int) -> list[Tensor]:
        """Negatives of each of these parts of the global batch's tokens, or those that all tokens share.

        Every `PIECE` tokens have a seed, so a process draws for its own tokens and for few others.
        """
        train, seed = self.config.train, seed_for(self.config.train.seed, "negatives", step)
        if train.shared_negatives:
            return [self._negatives(seed, targets_T, num_items)] * len(parts)
        first, end = min(part.start for part in parts) // PIECE * PIECE, max(part.stop for part in parts)
        pieces = [
            self._negatives(seed + start // PIECE, targets_T, num_items, min(PIECE, len(targets_T) - start))
            for start in range(first, end, PIECE)
        ]
        drawn = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return [drawn[part.start - first : part.stop - first] for part in parts]

    def _negatives(self, seed: int, targets_T: Tensor, num_items: int, tokens: int | None = None) -> Tensor:
        self._generator.manual_seed(seed)
        drawn = draw_negatives(targets_T, num_items, self.config.train, self._generator, tokens)
        assert drawn is not None, "the full softmax has no negatives"
        return drawn

    def _cut(self, data: Sequences, windows: Windows) -> Batch:
        return data.training_batch(windows, self.config.model.max_len, self.following)

    def source(self) -> Source:
        """Where a fused step cuts its batches from: tensors that stay where they are. `aim` fills them."""
        order_W = torch.zeros(self.size, dtype=torch.int64, device=self.data.device)
        following = None if self.moments is None else torch.zeros_like(self.moments.first)
        return Source(self.data.items, self.data.times, self.windows.starts, self.windows.ends, order_W, following)

    def aim(self, source: Source, epoch: int, index: int, is_next: bool) -> int | None:
        """Make batch `index` of an epoch one that `source` holds; is_next: the batch before it was cut from there.

        Returns where in its order the batch begins; None if that is where the batch before it ended.
        """
        if is_next:
            return None
        source.order_W.copy_(self.order(epoch))
        if source.following is not None and self.following is not None:
            source.following.copy_(self.following)
        return index * self.config.train.batch

    def close(self) -> None:
        """Let go of what reads ahead; a store in memory has nothing."""

    def _has_target(self, chosen_N: Tensor) -> Tensor:
        """Which windows have at least one of the chosen events among their targets, or their possible targets; [W]."""
        running = torch.cat((chosen_N.new_zeros(1, dtype=torch.int64), chosen_N.cumsum(0)))
        first_W, end_W = self.windows.starts + 1, self.windows.ends
        if self.moments is not None:
            last_W = self.windows.ends - 2
            first_W = self.moments.first[self.windows.starts]
            end_W = self.moments.first[last_W] + self.moments.size[last_W]
        return running[end_W] > running[first_W]

    def _shuffle(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(seed_for(self.config.train.seed, "order", epoch))
        order = torch.randperm(len(self._lengths_W), generator=generator)
        if self._fresh_W is not None:  # the new windows, and the first of the others, in the shuffled order
            is_fresh = self._fresh_W[order]
            is_fresh |= (~is_fresh).cumsum(0) <= self.size - int(is_fresh.sum())
            order = order[is_fresh]
        self._epoch, self._ordered_lengths_W = epoch, self._lengths_W[order]
        self._order = order.to(self.data.device)
        self._tokens = [int(part.sum()) for part in self._ordered_lengths_W.split(self.config.train.batch)]
        if self.moments is not None:
            self._generator.manual_seed(seed_for(self.config.train.seed, "targets", epoch))
            self.following = self.moments.draw(self._generator)


class Objective(nn.Module):
    """Model and loss as one module."""

    def __init__(self, model: SequentialRecommender, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, work: Work) -> Tensor:
        """A part of the mean loss over the global batch's targets."""
        batch, table = work.batch, self.model.whole_items if work.table is None else work.table
        # In training the last query's moment is known as well: that of its target.
        t_now_B = batch.target_times.gather(1, batch.lengths[:, None] - 1)[:, 0]
        out_BLE = self.model.encode(batch.items, batch.times, batch.lengths, t_now_B, table)
        # Each place comes once, so the gradient of this selection has nothing to add up in some order.
        out_TE = out_BLE.flatten(0, 1).index_select(0, work.places_T)
        targets_T = batch.targets.flatten()[work.places_T]
        # Not in bf16: a cosine of 1 is a score of 20 at temperature 0.05, where bf16 goes in steps of an eighth.
        with torch.autocast(out_TE.device.type, enabled=False):
            losses_T = token_losses(out_TE, targets_T, table.vectors(), work.negatives, self.temperature)
        return losses_T.sum() * work.share


def _valid_places(lengths_B: Tensor, total: int, max_len: int) -> Tensor:
    """Where the valid positions lie in a flattened [B, L]; `total` saves asking the device for their number."""
    row_T = torch.repeat_interleave(lengths_B, output_size=total)
    starts_B = lengths_B.cumsum(0) - lengths_B
    return torch.arange(total, device=lengths_B.device) - starts_B[row_T] + row_T * max_len
