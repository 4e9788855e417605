"""trope: rotary position embedding by wall-clock time, and the recommenders built on it."""

__version__ = "0.1.0"
