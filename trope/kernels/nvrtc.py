"""Compile CUDA C++ and launch it, with no compiler on the machine: the CUDA builds of torch bring NVRTC.

A kernel is `extern "C" __global__ void name(const Arguments a)`. All fields of its struct `Arguments` have 8 bytes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

HEADERS = Path(__file__).parent  # of warp.cuh
DEFAULT_SHARED = 48 << 10  # bytes of shared memory that a launch may have without asking first
OLDEST, HOPPER = (8, 0), (9, 0)  # compute capabilities: what warp.cuh needs, and what its wide products need
# Numbers of the driver's API (cuda.h).
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
CAPTURE_MODE_RELAXED = 2  # CUstreamCaptureMode

Argument = Tensor | int | float
Defines = tuple[tuple[str, int], ...]
Grid = tuple[int, int, int]

logger = logging.getLogger("trope")


def packed(arguments: Sequence[Argument]) -> bytes:
    """Return the bytes of a kernel's struct `Arguments`, 8 for each field: pointer, long long or double."""
    fields = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    return struct.pack("".join("d" if isinstance(x, float) else "q" for x in fields), *fields)


def is_available(device: int | None = None) -> bool:
    """Whether kernels in CUDA C++ run on a device, by default the current one: NVRTC is there and knows it."""
    if torch.version.cuda is None or sys.platform != "linux" or not torch.cuda.is_available():
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability >= OLDEST and _knows(capability)


def kernel(source: Path, name: str, defines: Defines, device: int | None = None) -> Kernel:
    """Return a kernel of a .cu file for a device, by default the current one; compiled at the first call.

    Args:
        source: it may include the .cuh files of its own folder and of trope/kernels.
        defines: names and values of macros.
    """
    return _kernel(source, name, defines, torch.cuda.current_device() if device is None else device)


def launch(
    source: Path, name: str, defines: Defines, grid: Grid, threads: int, shared: int, arguments: Sequence[Argument]
) -> None:
    """Launch a kernel on the device of its tensors; see `kernel` and `Kernel.launch`."""
    device = next(x.device.index for x in arguments if isinstance(x, Tensor))
    kernel(source, name, defines, device).launch(grid, threads, shared, arguments)


class Kernel:
    """A loaded kernel of one device."""

    def __init__(self, function: ctypes.c_void_p, context: ctypes.c_void_p, device: int) -> None:
        self.function = function
        self.context = context
        self.device = device
        self.allowed_shared = DEFAULT_SHARED

    def launch(self, grid: Grid, threads: int, shared: int, arguments: Sequence[Argument]) -> None:
        """Launch on torch's current stream of the device. It does not wait, so it may be captured in a CUDA graph.

        Args:
            grid: blocks along x, y and z; none are launched if one of them is 0.
            threads: of a block.
            shared: bytes of dynamic shared memory of a block.
            arguments: the fields of the kernel's struct, in order; tensors of the device.
        """
        assert all(x.is_cuda for x in arguments if isinstance(x, Tensor))
        if 0 in grid:
            return
        stream = torch.cuda.current_stream(self.device).cuda_stream
        parameters = (ctypes.c_char_p * 1)(packed(arguments))
        with _current(self.context):
            if shared > self.allowed_shared:
                _call("cuFuncSetAttribute", self.function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
                self.allowed_shared = shared
            block = (threads, 1, 1)
            _call("cuLaunchKernel", self.function, *grid, *block, shared, ctypes.c_void_p(stream), parameters, None)


@functools.cache
def _kernel(source: Path, name: str, defines: Defines, device: int) -> Kernel:
    module, context, function = _module(source, defines, device), _context(device), ctypes.c_void_p()
    with _current(context), _relaxed_capture():
        _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    return Kernel(function, context, device)


@functools.cache
def _module(source: Path, defines: Defines, device: int) -> ctypes.c_void_p:
    """Compile all kernels of a file and load them."""
    context, module = _context(device), ctypes.c_void_p()
    architecture = _architecture(*torch.cuda.get_device_capability(device))
    binary = _compiled(source, (architecture, *(f"-D{name}={n}" for name, n in defines)))
    with _current(context), _relaxed_capture():
        _call("cuModuleLoadData", ctypes.byref(module), binary)
    return module


@functools.cache
def _context(device: int) -> ctypes.c_void_p:
    """The context of a device that torch uses, too."""
    torch.cuda.init()
    context = ctypes.c_void_p()
    with _relaxed_capture():
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def _architecture(major: int, minor: int) -> str:
    """Return the option that names a GPU: Hopper's is sm_90a, because sm_90 lacks the products of four warps."""
    return f"--gpu-architecture=sm_{major}{minor}{'a' if (major, minor) == HOPPER else ''}"


def _compiled(source: Path, options: tuple[str, ...]) -> bytes:
    nvrtc = _nvrtc()
    if nvrtc is None:
        raise RuntimeError(f"NVRTC is not there to compile {source}")
    found = {path.name: path.read_bytes() for folder in (HEADERS, source.parent) for path in folder.glob("*.cuh")}
    array = ctypes.c_char_p * len(found)
    headers, names = array(*found.values()), array(*(name.encode() for name in found))
    options = ("--std=c++17", "--device-as-default-execution-space", *options)  # generic lambdas cannot say __device__
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text, title = source.read_bytes(), str(source).encode()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, title, len(found), headers, names), "NVRTC")
    try:
        failed = nvrtc.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*(x.encode() for x in options))
        )
        if failed:
            _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "NVRTC")
            log = ctypes.create_string_buffer(size.value)
            _check(nvrtc.nvrtcGetProgramLog(program, log), "NVRTC")
            raise RuntimeError(f"NVRTC cannot compile {source} with {' '.join(options)}\n{log.value.decode()}")
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "NVRTC")
        binary = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, binary), "NVRTC")
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _knows(capability: tuple[int, int]) -> bool:
    """Whether NVRTC is there and compiles for a compute capability; what is missing is said once."""
    nvrtc, number, version = _nvrtc(), ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    if nvrtc is None:
        return False
    _check(nvrtc.nvrtcVersion(*map(ctypes.byref, version)), "NVRTC")
    _check(nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(number)), "NVRTC")
    known = (ctypes.c_int * number.value)()
    _check(nvrtc.nvrtcGetSupportedArchs(known), "NVRTC")
    major, minor = capability
    why = f"does not know GPUs of compute capability {major}.{minor}"
    if 10 * major + minor in known:
        try:
            _compiled(HEADERS / "warp.cuh", (_architecture(major, minor),))
            return True
        except RuntimeError as error:
            why = f"cannot compile ({' '.join(str(error).partition(chr(10))[2].split())})"
    logger.warning(
        "NVRTC %d.%d %s: Triton's kernels run instead of those in CUDA C++, and are slower",
        *(part.value for part in version), why,
    )  # fmt: skip
    return False


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """NVRTC of torch's CUDA, or None, which is said once."""
    name = f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}"
    # The name alone finds what the process has loaded already and what the loader knows. Else the packages of NVIDIA
    # beside torch have it: nvidia/cuda_nvrtc/lib for CUDA 12, nvidia/cu13/lib for CUDA 13.
    packages = Path(torch.__file__).parents[1] / "nvidia"
    for library in (name, *sorted(packages.glob(f"*/lib/{name}"))):
        with suppress(OSError):
            nvrtc = ctypes.CDLL(str(library))
            _load_builtins()
            return nvrtc
    logger.warning("NVRTC (%s) was not found: Triton's kernels run instead of those in CUDA C++, and are slower", name)
    return None


def _load_builtins() -> None:
    """Load what NVRTC needs to compile, and looks for by its name alone: it lies beside the NVRTC that was loaded."""
    loaded = [line.split(maxsplit=5)[-1].rstrip() for line in Path("/proc/self/maps").read_text().splitlines()]
    for folder in {Path(path).parent for path in loaded if "/libnvrtc.so" in path}:
        for part in folder.glob("libnvrtc-builtins.so*"):
            with suppress(OSError):
                ctypes.CDLL(str(part))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """Call a function of the driver; a RuntimeError says which failed and why."""
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what}: error {code}")


@contextmanager
def _current(context: ctypes.c_void_p) -> Iterator[None]:
    """Inside, the context is current in this thread. A thread of autograd may have none yet, or another device's."""
    _call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Inside, this thread may load code although a CUDA graph is being captured; loading puts nothing on a stream."""
    mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
