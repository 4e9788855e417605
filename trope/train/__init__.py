"""Training: the loop, its step (plain and fused), loss, optimiser, checkpoints and log."""
