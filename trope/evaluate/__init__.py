"""Evaluation: rank the full catalogue for every user, compute metrics, count for baselines, compare runs."""
