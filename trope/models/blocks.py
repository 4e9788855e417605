"""The blocks by the name they have in a config (`model.block`); `trope.config.BLOCKS` says what each allows."""

from __future__ import annotations

from trope.models.block import Block
from trope.models.hstu import HSTUBlock
from trope.models.modern import ModernBlock
from trope.models.transformer import SASRecBlock, TiSASRecBlock

BLOCKS: dict[str, type[Block]] = {
    "hstu": HSTUBlock,
    "sasrec": SASRecBlock,
    "tisasrec": TiSASRecBlock,
    "transformer": ModernBlock,
}
