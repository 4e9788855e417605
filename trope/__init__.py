"""trope: rotary position embedding by wall-clock time, and the recommenders built on it."""

from typing import Any

from trope.readout import TimeReadout
from trope.rotary import IndexRoPE, TORoPE, TRoPE, frequency_bank, frequency_parameters, query_times

__version__ = "0.1.0"
__all__ = [
    "IndexRoPE", "Recommender", "SequentialRecommender", "TORoPE", "TRoPE", "TimeReadout",
    "frequency_bank", "frequency_parameters", "query_times",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load the recommender on first use: `import trope` is for the encoding, and loads torch and numpy alone."""
    if name == "Recommender":
        from trope.serve.recommender import Recommender

        return Recommender
    if name == "SequentialRecommender":
        from trope.model import SequentialRecommender

        return SequentialRecommender
    raise AttributeError(f"module 'trope' has no attribute {name!r}")
