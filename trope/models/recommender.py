"""The recommender: items and times in, one vector per position out, compared with every item by cosine.

Six models are presets of one class (trope.config.PRESETS): a block, a bias and a rotary encoding. Weights are stored as
safetensors and the config as JSON, both checked on the way in; nothing is ever unpickled.

Shape letters: B batch, L positions, T jagged tokens, E width, V items.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trope.atomic import atomic_folder
from trope.config import Config, from_dict, to_dict
from trope.environment import __version__
from trope.kernels.attention import time_gaps
from trope.kernels.backend import resolve_backend
from trope.kernels.sequence_bounds import SequenceBounds
from trope.models.hub import find_folder
from trope.models.layers import Context, Rotation, first_rotary, make_blocks, relative_intervals
from trope.rotary.base import sequence_of
from trope.rotary.readout import TimeReadout
from trope.rotary.trope import DAY, WEEK, YEAR, TRoPE, query_times
from trope.runs import CARD, WEIGHTS
from trope.runs import MODEL_CONFIG as CONFIG

PERIODS = {"day": DAY, "week": WEEK, "year": YEAR}  # of rotary.jitter
FORMAT = "trope-model-1"


class SequentialRecommender(nn.Module):
    """Predicts, at every event of a history, the next item, for the moment at which it is chosen.

    Args:
        config: model and rotary groups are used here.
        num_items: V; items are 1 .. V, 0 is padding.
        time_span: first and last time of the training events, for the rotary encoding's conditioning.
    """

    def __init__(self, config: Config, num_items: int, time_span: tuple[int, int]) -> None:
        super().__init__()
        config = config.resolved  # what is saved with the weights must mean the same when a later version reads it
        model = config.model
        self.config, self.num_items, self.time_span = config, num_items, time_span
        self.items = nn.Embedding(num_items + 1, model.width, padding_idx=0)
        nn.init.trunc_normal_(self.items.weight, std=0.02)
        with torch.no_grad():
            self.items.weight[0] = 0
        # TiSASRec puts positions into its attention; everyone else adds them to the input.
        self.positions: nn.Embedding | None = None
        if model.block != "tisasrec":
            self.positions = nn.Embedding(model.max_len, model.width)
            nn.init.trunc_normal_(self.positions.weight, std=math.sqrt(1 / model.width))
        self.dropout = nn.Dropout(model.dropout)
        self.blocks = make_blocks(config, time_span)
        self.norm = nn.LayerNorm(model.width) if model.block != "hstu" else nn.Identity()
        self.readout: TimeReadout | None = None
        if config.readout_share:
            self.readout = TimeReadout(
                model.width, time_span, config.readout_share, config.rotary.learnable, check_values=False
            )

    @property
    def looks_later(self) -> bool:
        """Whether events of one time look from the next later one: `query_times(…, later=…)`."""
        return self.config.model.predicts == "next-moment"

    def encode(self, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor, t_now_B: Tensor | None = None) -> Tensor:
        """Unit vectors [B, L, E], float32; position m speaks for event m + 1, the last valid one for `t_now_B`.

        Args:
            items_BL: int64, right-padded with 0.
            times_BL: int64 Unix seconds.
            lengths_B: valid events per row.
            t_now_B: the moment after each history; without one the last position looks from its own time.
        """
        B, L = items_BL.shape
        self._check_len(L)
        bounds = SequenceBounds.padded(lengths_B, L)
        looking_from_BL = query_times(times_BL, lengths_B, t_now_B, check_values=False, later=self.looks_later)
        index_BL = torch.arange(L, device=items_BL.device).expand(B, L)
        x_BLE = self._embed(items_BL, None if self.positions is None else self.positions.weight[:L])
        out_TE = self.run(
            x_BLE.flatten(0, 1), bounds, times_BL.flatten(), looking_from_BL.flatten(), index_BL.flatten()
        )
        return self.normalise(out_TE).unflatten(0, (B, L))

    def encode_last(self, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor, t_now_B: Tensor) -> Tensor:
        """The vector of each history's last event, [B, E]: what to recommend at `t_now_B`."""
        out_BLE = self.encode(items_BL, times_BL, lengths_B, t_now_B)
        return out_BLE[torch.arange(len(out_BLE), device=out_BLE.device), (lengths_B - 1).clamp(min=0)]

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
    ) -> Tensor:
        """All blocks over embedded tokens: raw outputs [T, E], not normalised.

        Args:
            x_TE: from `items` and `positions`.
            times_T, query_times_T: of each event, and from when its query looks.
            index_T: each token's place in its sequence.
            seed: int64 [1], of dropout inside HSTU's kernels; without one torch's generator draws it.
        """
        if self.training and (self.config.rotary.jitter != "none" or self.config.rotary.blur):
            moved_T = self._moved(bounds, times_T)
            times_T, query_times_T = times_T + moved_T, query_times_T + moved_T  # gaps stay as they were
        context = self._context(x_TE, bounds, times_T, query_times_T, index_T, seed)
        if self.config.model.block != "hstu":
            for block in self.blocks:
                x_TE = block(x_TE, context)
            return self.norm(x_TE)
        in_TE = x_TE
        delta_TE: Tensor | None = None
        for block in self.blocks:
            x_TE, delta_TE = block(x_TE, delta_TE, context)
        assert delta_TE is not None, "a model has at least one block"
        return x_TE + delta_TE if self.readout is None else self.readout.of_sum(x_TE, delta_TE, in_TE, query_times_T)

    @staticmethod
    def normalise(out_TE: Tensor) -> Tensor:
        """Unit vectors, float32."""
        return F.normalize(out_TE.float(), dim=-1, eps=1e-6)

    def item_vectors(self) -> Tensor:
        """Unit vectors of all items, float32 [V + 1, E]; row 0, the padding, is zero."""
        return F.normalize(self.items.weight.float(), dim=-1, eps=1e-6)

    def _embed(self, items: Tensor, positions: Tensor | None) -> Tensor:
        """Items [..] and their positions, with dropout; zero for padding. [.., E]."""
        x = self.items(items) * math.sqrt(self.config.model.width)
        if positions is not None:
            x = x + positions
        return self.dropout(x) * (items != 0)[..., None]

    def _context(
        self,
        x_TE: Tensor,
        bounds: SequenceBounds,
        times_T: Tensor,
        query_times_T: Tensor,
        index_T: Tensor,
        seed: Tensor | None,
    ) -> Context:
        model, device = self.config.model, x_TE.device.type
        rotary = first_rotary(self.blocks)
        coords = None if rotary is None else self._coordinates(rotary, times_T, query_times_T, index_T)
        gaps = intervals = None
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_TE.dtype
        if model.block == "hstu" and model.time_bias:
            gaps = time_gaps(times_T, query_times_T, bounds, model.time_buckets, like=x_TE)
        if model.block == "tisasrec":
            intervals = relative_intervals(times_T[bounds.places()[0]], model.intervals)
        drops = model.block == "hstu" and self.training and model.dropout > 0
        if not drops or resolve_backend("auto", x_TE) == "torch":
            seed = None  # nothing to drop, or modules do
        elif seed is None:
            seed = torch.randint(2**62, (1,), device=x_TE.device)
        slots_T = None
        if model.block != "hstu" and not bounds.is_padded:
            slots_T = bounds.row_of(torch.arange(len(times_T), device=times_T.device)) * bounds.max_len + index_T
        return Context(bounds, coords, gaps, intervals, seed, dtype, slots_T)

    def _moved(self, bounds: SequenceBounds, times_T: Tensor) -> Tensor:
        """Seconds to move each history by in training, so that its date is not learned by heart, int64 [T].

        `rotary.jitter`: a random number of whole periods, at most half the time span either way. `rotary.blur`: a
        normal draw whose deviation is that share of the time span.
        """
        rotary, span = self.config.rotary, self.time_span[1] - self.time_span[0]
        shape, device = bounds.starts_B.shape, times_T.device
        seconds_B = torch.zeros(shape, dtype=torch.float64, device=device)
        if rotary.jitter != "none":
            period = PERIODS[rotary.jitter]
            most = max(1, int(span / 2 / period))
            seconds_B += torch.randint(-most, most + 1, shape, device=device).double() * period
        if rotary.blur:
            seconds_B += torch.randn(shape, device=device).double() * (rotary.blur * span)
        token_T = torch.arange(len(times_T), device=device)
        row_T = bounds.row_of(token_T).clamp(max=len(seconds_B) - 1)
        return seconds_B.long()[row_T]

    def _coordinates(
        self, rotary: Rotation, times_T: Tensor, query_times_T: Tensor, index_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Where tokens stand; HSTU's kernel counts T-RoPE's from the origin itself."""
        if self.config.model.block == "hstu" and isinstance(rotary, TRoPE) and rotary.is_linear:
            return rotary.uncentred_at(times_T, query_times_T, index_T)
        return rotary.coordinates_at(times_T, query_times_T, index_T)

    def _check_len(self, length: int) -> None:
        most = self.config.model.max_len
        if length > most:
            raise ValueError(f"histories must have at most max_len = {most} events, got {length}; cut to the last")

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights, config and a model card; the folder appears, or is replaced, only when whole."""
        with atomic_folder(Path(folder)) as partial:
            save_file({name: x.detach().cpu().contiguous() for name, x in self._state().items()}, partial / WEIGHTS)
            described = {
                "format": FORMAT, "trope": __version__, "num_items": self.num_items,
                "time_span": list(self.time_span), "config": to_dict(self.config),
            }  # fmt: skip
            (partial / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
            (partial / CARD).write_text(_card(described), encoding="utf-8")

    def _state(self) -> dict[str, Tensor]:
        """The state without the names under which shared tables appear again (TiSASRec's blocks share theirs)."""
        seen: set[int] = set()
        return {
            name: x
            for name, x in self.state_dict().items()
            if not (x.data_ptr() in seen or seen.add(x.data_ptr()))  # type: ignore[func-returns-value]
        }

    @classmethod
    def from_pretrained(cls, source: str | Path, revision: str | None = None) -> SequentialRecommender:
        """Read what `save_pretrained` wrote: a folder, or a repository on the Hugging Face hub ("owner/name")."""
        folder = find_folder(source, revision)
        described = _read_config(folder)
        model = cls(from_dict(described["config"]), described["num_items"], tuple(described["time_span"]))
        try:
            weights = load_file(folder / WEIGHTS)
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(
                f"cannot read the weights {folder / WEIGHTS}: {error}; copy the checkpoint again"
            ) from None
        expected = {name: x.shape for name, x in model._state().items()}
        found = {name: x.shape for name, x in weights.items()}
        if expected != found:
            wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
            raise ValueError(
                f"the weights in {folder} do not fit its config: {', '.join(wrong[:5])}; foreign or damaged"
            )
        model.load_state_dict(weights, strict=False)
        return model


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json, checked: it may come from anywhere."""
    try:
        described = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} holds no {CONFIG}; is it the folder of a trained model?") from None
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} is not JSON: {error}; copy the checkpoint again") from None
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise ValueError(f"{folder / CONFIG} is not of format {FORMAT}; it is no trope model, or of another version")
    items, span = described.get("num_items"), described.get("time_span")
    if not isinstance(items, int) or items < 1 or not isinstance(described.get("config"), dict):
        raise ValueError(f"{folder / CONFIG} is damaged: num_items {items!r}; copy the checkpoint again")
    if not (isinstance(span, list) and len(span) == 2 and all(isinstance(t, int) for t in span)):
        raise ValueError(f"{folder / CONFIG} is damaged: time_span {span!r}; copy the checkpoint again")
    return described


def _card(described: dict[str, Any]) -> str:
    model, rotary = described["config"]["model"], described["config"]["rotary"]
    return (
        "---\nlibrary_name: trope\ntags: [recommendation, sequential-recommendation]\n---\n\n"
        f"# {model['block']} with {rotary['kind']} rotary encoding\n\n"
        f"A sequential recommender made with trope {described['trope']}: {described['num_items']:,} items, "
        f"{model['blocks']} blocks of width {model['width']}, histories of up to {model['max_len']} events.\n\n"
        "```python\nfrom trope.model import SequentialRecommender\n"
        'model = SequentialRecommender.from_pretrained("this folder")\n```\n'
    )
