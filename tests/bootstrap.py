"""The bootstrap of one metric and of one difference, which comparisons of many systems must agree with."""

from trope.evaluate.metrics import Floats, Interval, interval, resampled_means


def paired_bootstrap(ours: Floats, theirs: Floats, resamples: int = 10_000, seed: int = 0) -> Interval:
    """The mean of `ours - theirs` and its percentile interval when users are drawn again with replacement.

    ours, theirs: [U] or [U, M], the same users in the same order; all metrics share each draw.
    """
    return bootstrap(ours - theirs, resamples, seed)


def bootstrap(values: Floats, resamples: int = 10_000, seed: int = 0) -> Interval:
    """The mean over users and its percentile interval; values: [U] or [U, M]."""
    return interval(values.mean(axis=0), resampled_means(values, resamples, seed))
