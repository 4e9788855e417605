"""Random numbers that depend on a seed and a position alone, the same in PyTorch and in Triton."""
