"""trope: rotary position embedding by wall-clock time, and the recommenders built on it."""

from trope.rotary import IndexRoPE, TORoPE, TRoPE, frequency_bank, frequency_parameters, query_times

__version__ = "0.1.0"
__all__ = ["IndexRoPE", "TORoPE", "TRoPE", "frequency_bank", "frequency_parameters", "query_times"]
