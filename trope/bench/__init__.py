"""Speed: kernels, training steps and evaluation on shapes of real datasets."""
