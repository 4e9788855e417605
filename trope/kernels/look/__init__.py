"""Attention of a few new tokens to remembered keys and to each other: HSTU's without softmax, and the softmax kind.

Plain PyTorch everywhere: two products and a few passes over the scores. reference.py holds both functions.
"""

from trope.kernels.look.reference import KeysValues, look_silu, look_softmax

__all__ = ["KeysValues", "look_silu", "look_softmax"]
