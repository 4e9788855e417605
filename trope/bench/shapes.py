"""The shapes that `trope bench train` and `trope bench eval` measure, and generated events of each.

Users, items and events are those of the paper's datasets (its table of statistics); `shop` is a large shop of our own
making: 4.8 M items, 512 events a history, twelve narrow blocks, and one second moment a row for a table of that size
(`train.table_state`); `shop-100m` is the same with a hundred million items. Items are drawn uniformly and times rise by
gaps spread evenly over their logarithm, from seconds to a month; neither matters for speed as long as the table is
touched everywhere and buckets are of many kinds. Histories are as long as the dataset's on average: 5 events at least
(the 5-core) and geometric beyond, cut at max_len + 1; or all full, which is the worst case.

Shapes: U users, N events.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from trope.config import Config
from trope.data.sequences import Sequences
from trope.experiments.variants import configure

FIRST = 1_500_000_000
LEAST = 5  # events of a user


@dataclass(frozen=True)
class Shape:
    """A dataset's size and the model that is trained on it.

    users, items, events: of the dataset. max_len, width, blocks, heads, head_dim: of the model. batch, table_state: of
    training.
    """

    name: str
    users: int
    items: int
    events: int
    max_len: int = 50
    width: int = 512
    blocks: int = 2
    heads: int = 4
    head_dim: int = 128
    batch: int = 128
    table_state: Literal["full", "row"] = "full"

    def config(self, model: str, *settings: str) -> Config:
        """The model at this size: a preset, or a variant that has a name."""
        size = {"width": self.width, "blocks": self.blocks, "heads": self.heads, "head_dim": self.head_dim}
        fields = [f"model.{name}={value}" for name, value in size.items()]
        training = [f"train.batch={self.batch}", f"train.table_state={self.table_state}"]
        return configure(model, [*fields, f"model.max_len={self.max_len}", *training, *settings])


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("pixel200k", 200_000, 96_282, 3_965_656),
        Shape("pixel1m", 1_001_822, 100_541, 19_886_579),
        Shape("pixel8m", 8_886_078, 407_082, 158_488_682),
        Shape("ml20m", 138_493, 26_744, 20_000_263, max_len=200),
        Shape("books", 776_370, 495_063, 9_488_297),
        Shape("shop", 100_000, 4_800_000, 30_000_000, max_len=512, width=128, blocks=12, heads=8, head_dim=32,
              table_state="row"),
        Shape("shop-long", 2_000, 4_800_000, 8_000_000, max_len=4096, width=128, blocks=12, heads=8, head_dim=32,
              batch=16, table_state="row"),
        Shape("shop-100m", 100_000, 100_000_000, 30_000_000, max_len=512, width=128, blocks=12, heads=8, head_dim=32,
              table_state="row"),
        Shape("tiny", 200, 300, 2_000, max_len=16, width=32, blocks=2, heads=2, head_dim=16, batch=16),
    )
}  # fmt: skip


def find_shape(name: str) -> Shape:
    """A shape by name."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; choose one of {', '.join(SHAPES)}")
    return SHAPES[name]


def generate(shape: Shape, users: int, full: bool, device: torch.device, seed: int = 0) -> Sequences:
    """Events of some users with the shape's catalogue and lengths, leave-one-out, made on the device.

    full: every history fills the model.
    """
    generator = torch.Generator(device).manual_seed(seed)
    # Two more than the model sees of training: one to validate and one to test on.
    most = shape.max_len + 3
    if full:
        lengths_U = torch.full((users,), most, device=device)
    else:
        mean_beyond = max(shape.events / shape.users - LEAST, 0.5)
        uniform_U = torch.rand(users, generator=generator, device=device, dtype=torch.float64)
        beyond_U = (uniform_U.log() / math.log(mean_beyond / (1 + mean_beyond))).long()
        lengths_U = (LEAST + beyond_U).clamp(max=most)
    offsets = torch.nn.functional.pad(lengths_U.cumsum(0), (1, 0))
    events = int(offsets[-1])
    items_N = torch.randint(1, shape.items + 1, (events,), generator=generator, device=device, dtype=torch.int32)
    gaps_N = (torch.rand(events, generator=generator, device=device) * math.log(30 * 86_400)).exp().long()
    since_N = gaps_N.cumsum(0)
    first_U = since_N[offsets[:-1]]
    times_N = FIRST + since_N - torch.repeat_interleave(first_U, lengths_U, output_size=events)
    return Sequences.leave_one_out(items_N, times_N, offsets, shape.items, Path(f"generated-{shape.name}"))
