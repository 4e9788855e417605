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

from trope import __version__
from trope.bias import time_buckets
from trope.config import Config, from_dict, to_dict
from trope.layers import Context, make_blocks, relative_intervals
from trope.rotary import query_times
from trope.rotary_base import sequence_of
from trope.whole import whole_folder

FORMAT = "trope-model-1"
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"


class SequentialRecommender(nn.Module):
    """Predicts, at every event of a history, the next item, for the moment at which it is chosen.

    Args:
        config: model and rotary groups are used here.
        num_items: V; items are 1 .. V, 0 is padding.
        time_span: first and last time of the training events, for the rotary encoding's conditioning.
    """

    def __init__(self, config: Config, num_items: int, time_span: tuple[int, int]) -> None:
        super().__init__()
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

    def encode(self, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor, t_now_B: Tensor | None = None) -> Tensor:
        """Unit vectors [B, L, E], float32; position m speaks for event m + 1, the last valid one for `t_now_B`.

        Args:
            items_BL: int64, right-padded with 0.
            times_BL: int64 Unix seconds.
            lengths_B: valid events per row.
            t_now_B: the moment after each history; without one the last position looks from its own time.
        """
        L = items_BL.shape[1]
        if self.config.model.max_len < L:
            raise ValueError(
                f"histories must have at most max_len = {self.config.model.max_len} events, got {L}; cut to the last"
            )
        x_BLE = self.items(items_BL) * math.sqrt(self.config.model.width)
        if self.positions is not None:
            x_BLE = x_BLE + self.positions.weight[:L]
        x_BLE = self.dropout(x_BLE) * (items_BL != 0)[..., None]
        context = self._context(times_BL, lengths_B, t_now_B)
        for block in self.blocks:
            x_BLE = block(x_BLE, context)
        return F.normalize(self.norm(x_BLE).float(), dim=-1, eps=1e-6)

    def encode_last(self, items_BL: Tensor, times_BL: Tensor, lengths_B: Tensor, t_now_B: Tensor) -> Tensor:
        """The vector of each history's last event, [B, E]: what to recommend at `t_now_B`."""
        out_BLE = self.encode(items_BL, times_BL, lengths_B, t_now_B)
        return out_BLE[torch.arange(len(out_BLE), device=out_BLE.device), (lengths_B - 1).clamp(min=0)]

    def encode_jagged(self, items_T: Tensor, times_T: Tensor, offsets: Tensor, t_now_B: Tensor | None = None) -> Tensor:
        """The same as `encode` on flat tokens, [T, E]. Padded inside, for now: jagged in form, not yet in cost."""
        lengths = offsets.diff()
        index = torch.arange(len(items_T), device=items_T.device)
        row = sequence_of(index, offsets)
        column = index - offsets[row]
        width = int(lengths.max()) if len(lengths) else 0
        items, times = (x.new_zeros(len(lengths), width).index_put((row, column), x) for x in (items_T, times_T))
        return self.encode(items, times, lengths, t_now_B)[row, column]

    def item_vectors(self) -> Tensor:
        """Unit vectors of all items, float32 [V + 1, E]; row 0, the padding, is zero."""
        return F.normalize(self.items.weight.float(), dim=-1, eps=1e-6)

    def _context(self, times_BL: Tensor, lengths_B: Tensor, t_now_B: Tensor | None) -> Context:
        model = self.config.model
        buckets = intervals = None
        if model.block == "hstu" and model.time_bias:
            looking_from = query_times(times_BL, lengths_B, t_now_B, check_values=False)
            buckets = time_buckets(looking_from, times_BL, model.time_buckets)
        if model.block == "tisasrec":
            intervals = relative_intervals(times_BL, model.intervals)
        return Context(times_BL, lengths_B, t_now_B, buckets, intervals)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights, config and a model card; the folder appears, or is replaced, only when whole."""
        with whole_folder(Path(folder)) as partial:
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
    def from_pretrained(cls, folder: str | Path) -> SequentialRecommender:
        """Read what `save_pretrained` wrote."""
        folder = Path(folder)
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
