"""Evaluation: rank the full catalogue for every user, compute metrics, compare runs and popularity baselines."""
