"""Attention of a few new tokens to remembered keys and to each other: HSTU's without softmax, and the softmax kind.

Plain PyTorch everywhere: two products and a few passes over the scores. reference.py holds all functions.
"""

from trope.kernels.look.reference import KeysValues, look_silu, look_softmax, step_silu

__all__ = ["KeysValues", "look_silu", "look_softmax", "step_silu"]
