"""The paper: rotary encodings by time. Read `trope.py` first; torch and nothing else is imported below here.

trope.py      TRoPE
shift.py      the time each query looks from
banks.py      time constants of the planes
readout.py    TimeReadout: the network's output rotated by the request time
baselines.py  TO-RoPE and index RoPE, with the same interface
base.py       what the encodings share: shapes, checks, casts, cos and sin tables
checks.py     refusals of bad input
"""

from trope.rotary.banks import calendar_bank, frequency_bank
from trope.rotary.base import CosSin
from trope.rotary.baselines import IndexRoPE, TORoPE
from trope.rotary.readout import TimeReadout
from trope.rotary.shift import query_times
from trope.rotary.trope import NEUTRAL_SPAN, TRoPE, frequency_parameters

__all__ = [
    "NEUTRAL_SPAN", "CosSin", "IndexRoPE", "TORoPE", "TRoPE", "TimeReadout",
    "calendar_bank", "frequency_bank", "frequency_parameters", "query_times",
]  # fmt: skip
