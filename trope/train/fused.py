"""One launch per step: cut, draw, forward, loss, backward and optimiser as one CUDA graph.

The mathematics is that of `trope.train.step`; what differs is where it happens:
- the item table is outside of autograd: the loss gives the gradient of the outputs and a coefficient for each
  candidate, and one pass over the table applies gradient and AdamW together (trope.kernels.table), so the gradient of a
  table of millions of rows never exists;
- negatives that are drawn for each token are gathered (trope.kernels.softmax). Negatives that the whole batch shares
  (`train.shared_negatives`) are matrix products (trope.kernels.softmax.shared). Both are drawn from the catalogue or
  from the batch's items. A product over the batch's items for draws of each token would compute up to T scores a token
  for the N that count;
- the turning dims of the network's input are a second input, a view of the first: the readout subtracts them. Their
  gradient is then as narrow as they are, and `embed_backward` adds it to the input's;
- the network's parameters move in one launch, which also writes the copies in bf16 that the next step's products read
  (trope.train.matrices);
- in a batch of few tokens the network leaves much of the GPU free, and the update of a large table takes long: there
  more goes on beside the network (trope.kernels.aside).
  During the forward pass the batch's entries are sorted by item, and the time bias finds its buckets. During the
  backward pass the rows that are no token's input are updated, which is nearly all of the table, on multiprocessors
  of their own (trope/kernels/table/own.cu). Only the rows of the batch's own items wait for the network's gradient.
  Gradients of the network's parameters, which nothing in the backward pass waits for, are formed beside it, too;
- everything that changes from step to step lives on the device: the cursor into the epoch's order, the step number, the
  learning rates, and the seed of everything random, which depends on the step alone: a resumed run draws the same;
- a batch takes as many tokens as it has events, rounded up to one of a few sizes. The first batch of a size runs as
  ordinary launches, the second is captured, every later one is one launch.
The whole step also runs without a GPU and without a graph, in plain PyTorch: that is how the tests compare it.

Shapes: B batch, L positions, T tokens, E width, F turning dims, V catalogue, C candidates of a token, N negatives, W
training windows.
"""

from __future__ import annotations

import gc
import logging
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trope.config import Config
from trope.data.sequences import Sequences
from trope.data.stream import Stream
from trope.kernels.adamw import factors_of
from trope.kernels.aside import Aside, Beside, Late
from trope.kernels.backend import Backend
from trope.kernels.batch import BatchShape, Tokens, gather_batch
from trope.kernels.embed import embed, embed_backward
from trope.kernels.softmax import draw_uniform, sampled_softmax
from trope.kernels.softmax.shared import shared_softmax
from trope.kernels.table import InputEntries, Part, ScoreEntries, own_multiprocessors
from trope.models.recommender import SequentialRecommender
from trope.train.divergence import DivergenceGuard
from trope.train.loss import draw_negatives
from trope.train.matrices import Matrices
from trope.train.optimizer import table_hyper, table_rate
from trope.train.step import Feed, seed_for

# A batch's tokens are rounded up to a multiple of 1/16 of a full batch: few graphs, and on average 1/32 of it padding.
SIZES = 16
# Work goes on beside the network in batches of up to so many tokens, and in any batch if the item table has at least so
# many numbers. Measured on an H200 (results/aside-h200.txt): with small tables 6,400 tokens gain 8 % and 25,600 lose
# 3 %; with 6e8 numbers 65,536 tokens gained 5 % at 23680ce, less since (docs/speed.md). Nothing between was measured.
BESIDE, BESIDE_LARGE = 1 << 14, 1 << 27
# The update of most of the table has so many of the GPU's multiprocessors for itself, where the table has at most so
# many numbers. A larger one takes longer than the network beside it, and has the whole GPU once the network is done.
# 0.24 to 0.75 were measured on an H200 with a table of 5e7 numbers (results/step-h200.txt); no other size was.
OWN_SHARE, OWN_MOST = 0.5, 1 << 27
# Priority of streams that go before the network's, which has -1: the table's multiprocessors are taken before the
# network spreads over all, and the short launches at the step's end do not wait for the rows of the batch's items.
AHEAD = -2
# And of the stream that forms gradients of the network's parameters: the network's own. Behind the network they come so
# late that the step's end waits for them: 1.17 instead of 1.14 ms a step (results/step-h200.txt).
BEHIND = -1
_EMBED_STREAM = 0  # of dropout; blocks have 1, 2, ..

logger = logging.getLogger("trope")


class StepResult(NamedTuple):
    """Loss and gradient norm of a step, on the device; overwritten by the next step of the same size."""

    loss: Tensor
    norm: Tensor


class Scored(NamedTuple):
    """The loss and what both gradients of its mean are made of: entry e adds coefs[e] * rows[e // C] to its item."""

    loss_T: Tensor
    grad_out_TE: Tensor  # by the network's outputs
    coefs: Tensor  # [T, C], or [T + N, 1]
    rows: Tensor  # [T, E], or [T + N, E]


class FusedStep:
    """The training step of one process.

    Args:
        model, optimizer: on one device; the optimiser's moments of the item table are updated here.
        loss_sum: float64 scalar; each step adds its loss.
        step: steps done before.
        backend: of the kernels that are not inside the model.
    """

    def __init__(
        self,
        model: SequentialRecommender,
        data: Sequences | Stream,
        config: Config,
        feed: Feed,
        optimizer: torch.optim.Optimizer,
        guard: DivergenceGuard,
        loss_sum: Tensor,
        step: int,
        is_bf16: bool,
        backend: Backend = "auto",
    ) -> None:
        self.model, self.config, self.feed, self.optimizer = model, config, feed, optimizer
        self.guard, self.loss_sum, self.is_bf16, self.backend = guard, loss_sum, is_bf16, backend
        self.device = data.device
        self.source = feed.source()
        self.cursor, self.seed = (torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(2))
        self.table = model.whole_items
        self.unit_VE = self.table.unit_copy(torch.bfloat16 if is_bf16 else torch.float32, backend)
        self.no_positions = torch.zeros((config.model.max_len, config.model.width), device=self.device)
        # With a largest norm the optimiser updates the table as any parameter.
        self.hyper = table_hyper(optimizer, self.table.weight, step, holds_moments=config.train.clip == 0)
        low_dtype = torch.bfloat16 if is_bf16 else None
        self.matrices = Matrices(model, optimizer, self.hyper, config.train.clip == 0, low_dtype, backend)
        self.is_captured = self.device.type == "cuda"
        # `aside` and `small` sort the batch's entries and take what the network leaves free. `late` is for gradients of
        # its parameters. Ahead of the network go `soon`, for what it waits for and its parameters' AdamW, `own`, for
        # the table's update, and `last`, for the draw and the loss.
        self.aside, self.small = (Aside(self.device) for _ in range(2))
        self.soon, self.own, self.last = (Aside(self.device, priority=AHEAD) for _ in range(3))
        self.late = Late(self.device, priority=BEHIND)
        weight = self.table.weight
        self.multiprocessors = own_multiprocessors(weight, OWN_SHARE, backend) if weight.numel() <= OWN_MOST else 0
        self._stream = torch.cuda.Stream(self.device, priority=-1) if self.is_captured else None
        self._graphs: dict[BatchShape, tuple[torch.cuda.CUDAGraph, StepResult]] = {}
        self._seen: set[BatchShape] = set()
        self._pool = torch.cuda.graph_pool_handle() if self.is_captured else None
        self._epoch, self._next = -1, -1

    def learning_rate_changed(self) -> None:
        """Take over the optimiser's learning rate of the table."""
        self.hyper[0] = table_rate(self.optimizer, self.table.weight)

    def __call__(self, epoch: int, index: int, step: int) -> StepResult:
        """Batch `index` of an epoch; `step` counts through all epochs."""
        is_next = epoch == self._epoch and index == self._next
        if (begin := self.feed.aim(self.source, epoch, index, is_next)) is not None:
            self.cursor.fill_(begin)
        self._epoch, self._next = epoch, index + 1
        plan = self._plan(self.feed.tokens(epoch, index))
        if self.is_captured and plan in self._seen and plan not in self._graphs:
            self._capture(plan)
        self._seen.add(plan)
        self._sow(seed_for(self.config.train.seed, "step", step))
        if plan not in self._graphs:
            return self._run(plan)
        graph, result = self._graphs[plan]
        graph.replay()
        return result

    def _plan(self, tokens: int) -> BatchShape:
        """The smallest size that holds a batch."""
        model, train = self.config.model, self.config.train
        full, columns = train.batch * model.max_len, 1 if train.shared_negatives else 1 + train.negatives
        part = 16 * math.ceil(full / SIZES / 16)
        size = min(full, part * math.ceil(tokens / part))
        spare = 0 if size == tokens else math.ceil(part / model.max_len)
        return BatchShape(train.batch, model.max_len, size, columns, spare)

    def _sow(self, seed: int) -> None:
        """Seed our kernels, and torch's generator for what is not ours: the Transformer blocks' dropout, and negatives
        that are shared or from the batch."""
        self.seed.fill_(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def _capture(self, plan: BatchShape) -> None:
        """Record the step; where that is not possible say so, and go on with ordinary launches."""
        graph = torch.cuda.CUDAGraph()
        # Collecting an old graph in the middle of it would spoil the recording.
        gc.collect()
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                result = self._run(plan)
        except RuntimeError as error:
            self.is_captured = False
            # torch's generator still believes that it is being recorded, and would refuse to draw. A new state of it is
            # not the one that graphs recorded before would draw from.
            self._graphs.clear()
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            generator = torch.cuda.default_generators[index]
            generator.graphsafe_set_state(torch.Generator(self.device).graphsafe_get_state())
            logger.warning("the training step cannot be captured in a CUDA graph, it runs slower: %s", error)
            return
        finally:
            if was_collecting:
                gc.enable()
        self._graphs[plan] = (graph, result)

    def _run(self, plan: BatchShape) -> StepResult:
        """The step itself. Nothing in here waits for the device."""
        model, backend = self.config.model, self.backend
        self.optimizer.zero_grad(set_to_none=True)
        tokens = gather_batch(self.source, plan, self.cursor, backend)
        is_small = plan.tokens <= BESIDE
        for beside in (self.aside, self.soon, self.small, self.own, self.last):
            beside.begin(is_small or self.table.weight.numel() >= BESIDE_LARGE)
        self.late.begin(is_small)  # what it reads would be much memory in a large batch, for nothing
        factors = None
        with self.small.work():
            inputs = self.table.input_entries(tokens.items_T, backend)
        with self.last.work():
            negatives = self._draw(tokens)
        with self.aside.work():
            self.aside.wait(self.last)
            if self.config.train.clip == 0:
                self.hyper[5] += 1
                factors = factors_of(self.hyper, self.backend)
            entries = self.table.entries_by_item(self._scored_items(tokens, negatives), backend)
        positions = self.model.positions
        positions_LE = self.no_positions if positions is None else positions.weight.detach()
        drops = (model.dropout, self.seed, _EMBED_STREAM, backend)
        rows_VE = self.table.weight.detach()
        x_TE = embed(tokens.items_T, tokens.index_T, rows_VE, positions_LE, self.table.scale, *drops).requires_grad_()
        F = self.model.start_dims
        start_TF = x_TE.detach()[:, :F].requires_grad_() if F else None
        # The cache of casts would outlive the capture.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_bf16, cache_enabled=False):
            out_TE = self.model.run(
                x_TE, tokens.bounds, tokens.times_T, tokens.query_times_T, tokens.index_T, self.seed, start_TF,
                self.matrices.low, Beside(self.soon, self.late),
            )  # fmt: skip
        self.last.join()
        found = self._score(out_TE.detach(), tokens, negatives)
        self.small.join()
        self.aside.join()
        scores = ScoreEntries(*entries, found.coefs, found.rows)
        others_sq = self._move_others(scores, inputs, factors)
        with self.last.work():
            loss = found.loss_T.sum() * tokens.weight[0]
            self.loss_sum += loss
        out_TE.backward(found.grad_out_TE.to(out_TE.dtype))
        self.late.check(self.model.parameters())
        assert x_TE.grad is not None
        bounds, grad_start_TF = tokens.bounds, None if start_TF is None else start_TF.grad
        grad_rows_TE, grad_positions_LE = embed_backward(
            x_TE.grad, tokens.items_T, bounds.starts_B, bounds.lengths_B, model.max_len, *drops, grad_start_TF,
            self.soon,
        )  # fmt: skip
        if positions is not None:
            positions.weight.grad = grad_positions_LE
        inputs = inputs._replace(grad_TE=grad_rows_TE)
        return StepResult(loss, self._update(scores, inputs, factors, loss, others_sq))

    def _move_others(self, scores: ScoreEntries, inputs: InputEntries, factors: Tensor | None) -> Tensor | None:
        """AdamW beside the network for the rows that it has no gradient for; returns what `_move` does.

        None where they move with the others: a largest norm needs that of everything before anything moves.
        """
        if not self.aside.is_open or factors is None:
            return None
        # own.cu takes outputs in the dtype of the unit vectors. Those of shared negatives are float32.
        own = self.multiprocessors if scores.out_TE.dtype == self.unit_VE.dtype else 0
        # Without multiprocessors of its own the update may not go ahead of the network: it would take all.
        with (self.own if own else self.aside).work():
            return self._move(scores, inputs, factors, "others", own)

    def _update(
        self,
        scores: ScoreEntries,
        inputs: InputEntries,
        factors: Tensor | None,
        loss: Tensor,
        others_sq: Tensor | None,
    ) -> Tensor:
        """AdamW for everything that has not moved; returns the gradient's norm.

        factors: of AdamW; None where there is a largest norm.
        """
        if factors is None:
            return self._clipped(scores, inputs, loss)
        with self.soon.work():  # beside the rows of the batch's own items
            self.soon.wait(self.late)
            parts, read_until_joined = self.matrices.move(factors, self.guard.place_of)
        norms_P = None
        if any(p.grad is not None for p in self.model.parameters()):
            with self.last.work():
                self.last.wait(self.late)
                norms_P = self.guard.stacked(self.guard.norms(known=[id(self.table.weight)]))
                self.optimizer.step()
                self.matrices.copy_others()
        squares = self._move(scores, inputs, factors, "all" if others_sq is None else "inputs")
        for beside in (self.soon, self.last, self.own, self.aside, self.late):
            beside.join()
        del read_until_joined
        return self.guard.with_parts(loss, norms_P, parts, self.table.weight, squares, others_sq)

    def _move(
        self, scores: ScoreEntries, inputs: InputEntries, factors: Tensor, part: Part, multiprocessors: int = 0
    ) -> Tensor:
        """AdamW for a part of the table's rows; returns the squared norm of their gradient in parts."""
        state = self.optimizer.state[self.table.weight]
        moments = (state["exp_avg"], state["exp_avg_sq"])
        return self.table.update(moments, self.unit_VE, scores, inputs, factors, self.backend, part, multiprocessors)

    def _clipped(self, scores: ScoreEntries, inputs: InputEntries, loss: Tensor) -> Tensor:
        """AdamW for everything, with a largest norm of the gradient; returns the norm that it had."""
        for beside in (self.last, self.soon, self.late):
            beside.join()
        self.table.weight.grad = self.table.gradient(scores, inputs, self.backend)
        norm = self.guard(loss)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.train.clip, norm)
        self.optimizer.step()
        self.matrices.copy_others()
        self.unit_VE.copy_(self.table.unit_copy(self.unit_VE.dtype, self.backend))
        return norm

    def _draw(self, tokens: Tokens) -> Tensor:
        """Draw negatives; those of each token are columns of its candidates."""
        train, V = self.config.train, self.model.num_items
        candidates_TC = tokens.candidates_TC
        if train.negative_source == "uniform" and not train.shared_negatives:
            draw_uniform(V, self.seed, candidates_TC, self.backend)
            return candidates_TC[:, 1:]
        targets_T = candidates_TC[:, 0]
        drawn = draw_negatives(targets_T.long(), V, train, None)
        assert drawn is not None, "the full softmax has no negatives"
        if not train.shared_negatives:
            candidates_TC[:, 1:] = drawn
            candidates_TC[:, 1:].masked_fill_(targets_T[:, None] == 0, 0)
        return drawn

    def _scored_items(self, tokens: Tokens, negatives: Tensor) -> Tensor:
        """The item of each entry that `_score` makes: candidates [T, C], or targets and shared negatives [T + N]."""
        if not self.config.train.shared_negatives:
            return tokens.candidates_TC
        return torch.cat((tokens.candidates_TC[:, 0], negatives))

    def _score(self, x_TE: Tensor, tokens: Tokens, negatives: Tensor) -> Scored:
        """The loss of the network's outputs: gathered where each token has negatives of its own, dense where not."""
        candidates_TC = tokens.candidates_TC
        how = (self.unit_VE, tokens.weight, self.config.train.temperature)
        if not self.config.train.shared_negatives:
            own = sampled_softmax(x_TE, candidates_TC, *how, backend=self.backend)
            return Scored(own.loss_T, own.grad_x_TE, own.coefs_TC, own.out_TE)
        targets_T, items_N = candidates_TC[:, 0], negatives
        shared = shared_softmax(x_TE, targets_T, items_N, *how)
        # A target's entry is a coefficient and an output, a shared negative's the whole row of its gradient.
        coefs = torch.cat((shared.coefs_T, torch.ones_like(items_N, dtype=shared.coefs_T.dtype)))
        rows = torch.cat((shared.out_TE, shared.grad_NE))
        return Scored(shared.loss_T, shared.grad_x_TE, coefs[:, None], rows)
