"""trope: rotary position embedding by wall-clock time, and the recommenders built on it."""

import importlib
from typing import TYPE_CHECKING, Any

from trope.environment import __version__

if TYPE_CHECKING:
    from trope.models.recommender import SequentialRecommender
    from trope.rotary import (
        IndexRoPE,
        TimeReadout,
        TORoPE,
        TRoPE,
        frequency_bank,
        frequency_parameters,
        query_times,
    )
    from trope.serve.recommender import Recommender

__all__ = [
    "IndexRoPE", "Recommender", "SequentialRecommender", "TORoPE", "TRoPE", "TimeReadout", "__version__",
    "frequency_bank", "frequency_parameters", "query_times",
]  # fmt: skip
_ELSEWHERE = {"Recommender": "trope.serve.recommender", "SequentialRecommender": "trope.models.recommender"}


def __getattr__(name: str) -> Any:
    """Load a name on first use: the encoding needs no model, and `trope --help` not even torch."""
    if name not in __all__:
        raise AttributeError(f"module 'trope' has no attribute {name!r}")
    value = getattr(importlib.import_module(_ELSEWHERE.get(name, "trope.rotary")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
