"""The sequential recommender: histories in, a unit vector per position out, to be compared with item vectors.

One class for every model; what differs is in the config (`trope.config.PRESETS`): a block, a bias and a rotary
encoding. Blocks ask for the context they need; nothing in here knows a block by name.

Shape letters: B batch, L positions, T jagged tokens, E width, F turning dims, V items.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trope.config import Config
from trope.kernels.aside import IN_PLACE, Beside, Late
from trope.kernels.sequence_bounds import SequenceBounds
from trope.models import pretrained
from trope.models.blocks import BLOCKS
from trope.models.context import Context, Stream
from trope.models.items import EPS, ItemTable
from trope.models.memory import Memory
from trope.models.pulse import Pulse
from trope.models.sharded_items import ShardedItemTable
from trope.rotary import TimeReadout, query_times
from trope.rotary.base import sequence_of


class SequentialRecommender(nn.Module):
    """Predicts, at every event of a history, the next item, for the moment at which it is chosen.

    Args:
        config: model and rotary groups are used here.
        num_items: V; items are 1 .. V, 0 is padding.
        time_span: first and last time of the training events, for the rotary encoding's conditioning.
        shard: rank and number of the processes that the item table is spread over; None keeps it whole.
        age_from: when the model's age begins, for its pulse; the end of `time_span` if None. An update learns later
            events and does not make a model young.
    """

    items: ItemTable | ShardedItemTable

    def __init__(
        self,
        config: Config,
        num_items: int,
        time_span: tuple[int, int],
        shard: tuple[int, int] | None = None,
        age_from: int | None = None,
    ) -> None:
        super().__init__()
        config = config.resolved  # what is saved with the weights must mean the same when a later version reads it
        model, block = config.model, BLOCKS[config.model.block]
        self.config, self.time_span = config, time_span
        self.age_from = time_span[1] if age_from is None else age_from
        if shard is None:
            self.items = ItemTable(num_items, model.width)
        else:
            self.items = ShardedItemTable(num_items, model.width, *shard)
        self.positions: nn.Embedding | None = None
        if block.adds_positions:
            self.positions = nn.Embedding(model.max_len, model.width)
            nn.init.trunc_normal_(self.positions.weight, std=math.sqrt(1 / model.width))
        self.dropout = nn.Dropout(model.dropout)
        self.blocks = nn.ModuleList(block.stack(config, time_span))
        self.norm = block.final_norm(config)
        self.readout: TimeReadout | None = None
        if config.readout_share:
            self.readout = TimeReadout(
                model.width, time_span, config.readout_share, config.rotary.learnable, check_values=False,
                until=time_span[1],
            )  # fmt: skip

        self.pulse: Pulse | None = None
        if model.pulse:
            turning = 0 if self.readout is None else self.readout.turn.head_dim
            self.pulse = Pulse(num_items, turning, time_span, self.age_from)

    @property
    def num_items(self) -> int:
        """V, the size of the catalogue."""
        return self.items.num_items

    @property
    def whole_items(self) -> ItemTable:
        """The item table, for what needs all of it in one process."""
        assert isinstance(self.items, ItemTable), "the item table is spread over processes"
        return self.items

    @property
    def looks_later(self) -> bool:
        """Whether events of one time look from the next later one: `query_times(…, later=…)`."""
        return self.config.model.predicts == "next-moment"

    def encode(
        self,
        items_BL: Tensor,
        times_BL: Tensor,
        lengths_B: Tensor,
        t_now_B: Tensor | None = None,
        table: ItemTable | None = None,
    ) -> Tensor:
        """Unit vectors [B, L, E], float32; position m speaks for event m + 1, the last valid one for `t_now_B`.

        Args:
            items_BL: int64, right-padded with 0.
            times_BL: int64 Unix seconds.
            lengths_B: valid events per row.
            t_now_B: the moment after each history; without one the last position looks from its own time.
            table: which the items are numbered in, instead of the model's own; see `ShardedItemTable.fetch`.
        """
        B, L = items_BL.shape
        self._check_len(L)
        bounds = SequenceBounds.padded(lengths_B, L)
        looking_from_BL = query_times(times_BL, lengths_B, t_now_B, check_values=False, later=self.looks_later)
        index_BL = torch.arange(L, device=items_BL.device).expand(B, L)
        x_BLE = self._embed(items_BL, None if self.positions is None else self.positions.weight[:L], table)
        times_T, looking_from_T = times_BL.flatten(), looking_from_BL.flatten()
        out_TE = self.run(x_BLE.flatten(0, 1), bounds, times_T, looking_from_T, index_BL.flatten())
        return self.normalise(out_TE).unflatten(0, (B, L))

    def encode_last(self, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor, t_now_B: Tensor) -> Tensor:
        """The vector of each history's last event, [B, E]: what to recommend at `t_now_B`."""
        out_BLE = self.encode(items_BL, times_BL, lengths_B, t_now_B)
        return out_BLE[torch.arange(len(out_BLE), device=out_BLE.device), (lengths_B - 1).clamp(min=0)]

    @property
    def can_remember(self) -> bool:
        """Whether `remember` and `look` work: every block can reuse keys and values."""
        return all(block.can_remember for block in self.blocks)

    def remember(self, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor) -> Memory:
        """Encode histories once, for `look` at any moment; arguments as in `encode`, at least one event each."""
        self._check_len(items_BL.shape[1])
        return Memory(self, items_BL, times_BL, lengths_B)

    def look(self, memory: Memory, moments: Tensor) -> Tensor:
        """What `encode_last` gives for each remembered history at each moment: unit vectors, float32 [B, M, E].

        moments: int64 Unix seconds, [B, M], or [M] for the same moments of every history.
        """
        return memory.look(moments)

    def encode_jagged(self, items_T: Tensor, times_T: Tensor, offsets: Tensor, t_now_B: Tensor | None = None) -> Tensor:
        """The same as `encode` on flat tokens, [T, E]. HSTU computes no padding; others pad for attention."""
        lengths_B = offsets.diff()
        self._check_len(int(lengths_B.max()) if len(lengths_B) else 0)
        token_T = torch.arange(len(items_T), device=items_T.device)
        index_T = token_T - offsets[sequence_of(token_T, offsets)]
        looking_from_T = query_times(
            times_T, t_now=t_now_B, offsets=offsets, check_values=False, later=self.looks_later
        )
        x_TE = self._embed(items_T, None if self.positions is None else self.positions(index_T))
        bounds = SequenceBounds.jagged(offsets, self.config.model.max_len)
        return self.normalise(self.run(x_TE, bounds, times_T, looking_from_T, index_T))

    def run(
        self,
        x_TE: Tensor,
        bounds: SequenceBounds,
        times_T: Tensor,
        query_times_T: Tensor,
        index_T: Tensor,
        seed: Tensor | None = None,
        start: Tensor | None = None,
        low: Callable[[Tensor], Tensor | None] | None = None,
        beside: Beside | None = None,
    ) -> Tensor:
        """All blocks, the final norm and the readout over embedded tokens: raw outputs [T, E], not normalised.

        Args:
            x_TE: from `items` and `positions`.
            times_T, query_times_T: of each event, and from when its query looks.
            index_T: each token's place in its sequence.
            seed: int64 [1], of dropout inside kernels; without one torch's generator draws it.
            start: the first `start_dims` of x_TE, or more of them, as a tensor of its own: the gradient of what the
                readout subtracts then goes there. Without it the readout subtracts x_TE itself.
            low, beside: see `Context`.
        """
        context = Context(bounds, times_T, query_times_T, index_T, like=x_TE, seed=seed, low=low, beside=beside)
        stream = Stream(x_TE)
        for block in self.blocks:
            stream = block(stream, context)
        return self.finish(stream, x_TE if start is None else start, query_times_T, context.late)

    @property
    def start_dims(self) -> int:
        """How many of the stream's first dims the readout subtracts at its end: F, or 0 where it subtracts none."""
        return 0 if self.readout is None or self.norm is not None else self.readout.turn.head_dim

    def finish(self, stream: Stream, start: Tensor, query_times_T: Tensor, late: Late = IN_PLACE) -> Tensor:
        """The final norm and the readout behind the last block, [T, E].

        start: what the stream began with, its first `start_dims` at least. late: of the `Context`.
        """
        if self.norm is not None:  # it mixes all dims: what the stream began with cannot be told from what was added
            out_TE = self.norm(stream)
            if self.readout is None:
                return out_TE
            return self.readout.of_sum(out_TE, None, None, self._readout_times(query_times_T), late)
        if self.readout is None:
            return stream.sum()
        return self.readout.of_sum(stream.x_TE, stream.delta_TE, start, self._readout_times(query_times_T), late)

    def _readout_times(self, query_times_T: Tensor) -> Tensor:
        """When the readout is asked: after the training data a pulse may know better than to stand still."""
        return query_times_T if self.pulse is None or self.training else self.pulse.known_times(query_times_T)

    @staticmethod
    def normalise(out_TE: Tensor) -> Tensor:
        """Unit vectors, float32."""
        return F.normalize(out_TE.float(), dim=-1, eps=EPS)

    def item_vectors(self) -> Tensor:
        """Unit vectors of all items, float32 [V + 1, E]; row 0, the padding, is zero."""
        return self.whole_items.vectors()

    def embed(self, items: Tensor, index: Tensor) -> Tensor:
        """What the blocks read of events, without dropout, [.., E]. index: each event's place in its history, [..]."""
        x = self.items.embed(items)
        return x if self.positions is None else x + F.embedding(index, self.positions.weight)

    def _embed(self, items: Tensor, positions: Tensor | None, table: ItemTable | None = None) -> Tensor:
        """Items [..] and their positions, with dropout; zero for padding. [.., E]."""
        x = (self.items if table is None else table).embed(items)
        if positions is not None:
            x = x + positions
        return self.dropout(x) * (items != 0)[..., None]

    def _check_len(self, length: int) -> None:
        most = self.config.model.max_len
        if length > most:
            raise ValueError(f"histories must have at most max_len = {most} events, got {length}; cut to the last")

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights, config and a model card; the folder appears, or is replaced, only when whole."""
        pretrained.save(self, Path(folder))

    @classmethod
    def from_pretrained(
        cls, source: str | Path, revision: str | None = None, verify: bool = True
    ) -> SequentialRecommender:
        """Read what `save_pretrained` wrote.

        source: a folder, or a repository on the Hugging Face hub, "hf://owner/name" or "hf://owner/name@revision".
        revision: the same as "@revision". verify: compare the weights with their SHA-256, which reads the file once
            more. Sizes, and that all numbers are finite, are always checked.
        """
        folder = pretrained.find_folder(source, revision)
        saved = pretrained.read_config(folder)
        with torch.device("meta"):  # no memory is taken until the file is known to hold weights of these sizes
            made = cls(saved.config, saved.num_items, saved.time_span, age_from=saved.age_from)
            pretrained.check_shapes(made, folder)
        model = cls(saved.config, saved.num_items, saved.time_span, age_from=saved.age_from)
        pretrained.fill(model, folder, saved.sha256 if verify else None)
        return model
