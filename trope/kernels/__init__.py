"""The kernels: tensors in, tensors out; they know nothing about recommenders.

One folder per operator: __init__.py has the function that others call and decides what runs, reference.py is the ground
truth in plain PyTorch, triton.py holds the GPU kernels. docs/kernels.md describes every operator. Only `rotate_qk`,
which drop-in users may want, is exported here.
"""

from trope.kernels.backend import Backend
from trope.kernels.rotary import rotate_qk

__all__ = ["Backend", "rotate_qk"]
