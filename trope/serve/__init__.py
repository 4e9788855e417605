"""Serving: recommendations for a given moment, from a finished run. Nothing in here knows how to train."""
