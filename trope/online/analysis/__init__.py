"""Plan an A/B test and analyse one: exposures and outcomes become lifts, intervals and a verdict.

`analyse` is the way in. Engines (`trope.data.engines`) reduce the logs to sums per arm and day. tea-tasting computes
the tests from those sums. Only the sequential part is our own (`spending`, `always`).
"""
