"""The kernels: tensors in, tensors out, nothing of recommenders.

Each op has a torch reference, a Triton version and one dispatch function; this module exports the dispatch functions.
"""

from trope.kernels.backend import Backend
from trope.kernels.rotary import rotate_qk

__all__ = ["Backend", "rotate_qk"]
