"""Evaluation: the full catalogue ranked for every user, metrics, counting baselines, comparisons of runs."""
