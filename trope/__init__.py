"""trope: rotary position embedding by wall-clock time, and the recommenders built on it."""

from typing import Any

from trope.environment import __version__
from trope.rotary import (
    IndexRoPE,
    TimeReadout,
    TORoPE,
    TRoPE,
    frequency_bank,
    frequency_parameters,
    query_times,
)

__all__ = [
    "IndexRoPE", "Recommender", "SequentialRecommender", "TORoPE", "TRoPE", "TimeReadout", "__version__",
    "frequency_bank", "frequency_parameters", "query_times",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load the recommender on first use: `import trope` is for the encoding, and loads torch and numpy alone."""
    if name == "Recommender":
        from trope.serve.recommender import Recommender

        return Recommender
    if name == "SequentialRecommender":
        from trope.models.recommender import SequentialRecommender

        return SequentialRecommender
    raise AttributeError(f"module 'trope' has no attribute {name!r}")
