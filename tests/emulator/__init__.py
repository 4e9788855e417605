"""A CPU plays the GPU: g++ compiles a kernel in CUDA C++ with emulate.h, and a test launches it on CPU tensors."""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from trope.kernels.nvrtc import Argument, Defines, Grid, packed

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "trope" / "kernels"
HAS_COMPILER = shutil.which("g++") is not None

# -fno-strict-aliasing: kernels read one piece of shared memory as several types, which CUDA allows.
OPTIONS = "-O2 -std=c++17 -shared -fPIC -fno-strict-aliasing -U_FORTIFY_SOURCE -Wno-unknown-pragmas -DTROPE_EMULATE"
# A kernel with one argument: `__global__ ... name(const Arguments a) {`.
KERNEL = re.compile(r"__global__[^;{}]*?\b(\w+)\s*\(\s*(?:\w+\s+)+\w+\s*\)\s*\{")
WRAPPER = """
extern "C" const char* run_{name}(
    const void* arguments, size_t bytes, const int* grid, int threads, int shared, int order) {{
  return emulate::run({name}, arguments, bytes, grid, threads, shared, order);
}}
"""
POISON = b"\xff"  # NaN in every float type


class Fenced:
    """Copies of tensors' memory, each between two pages that nobody may touch.

    A copy begins at the first of them, or it ends at the second. The rest between them is NaN, and must stay so.
    """

    PAGE = mmap.PAGESIZE

    def __init__(self, tensors: Sequence[Tensor], at_first: bool) -> None:
        self.storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
        self.copies: dict[int, tuple[mmap.mmap, int]] = {}  # and where in it the tensor begins
        libc = ctypes.CDLL(None, use_errno=True)
        for address, storage in self.storages.items():
            pages, size = -(-storage.nbytes() // self.PAGE), storage.nbytes()
            memory = mmap.mmap(-1, (pages + 2) * self.PAGE)
            begin = self.PAGE
            if not at_first:  # but for what is needed to begin at a multiple of 16
                begin += pages * self.PAGE - -(-size // 16) * 16
            memory[self.PAGE : -self.PAGE] = POISON * (pages * self.PAGE)
            memory[begin : begin + size] = ctypes.string_at(address, size)
            base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            for fence in (base, base + (pages + 1) * self.PAGE):
                assert libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(self.PAGE), 0) == 0  # PROT_NONE
            self.copies[address] = memory, begin

    def address(self, x: Tensor) -> int:
        storage = x.untyped_storage().data_ptr()
        if not storage:
            return 0
        memory, begin = self.copies[storage]
        return ctypes.addressof(ctypes.c_char.from_buffer(memory)) + begin + x.data_ptr() - storage

    def contents(self) -> dict[int, bytes]:
        """The bytes of each storage. A RuntimeError if something right beside one was written."""
        found = {}
        for address, (memory, begin) in self.copies.items():
            end = begin + self.storages[address].nbytes()
            if (memory[self.PAGE : begin] + memory[end : -self.PAGE]).strip(POISON):
                raise RuntimeError("wrote outside of a tensor, right beside it")
            found[address] = memory[begin:end]
        return found


class Module:
    """A compiled .cu file."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: list[Tensor | int | float],
    ) -> None:
        """Run a kernel to its end. A RuntimeError says where threads wait for each other in vain, and the like.

        It runs twice, with the threads in two orders and the tensors at either fence; both must give the same bits.
        """
        for x in arguments:
            if isinstance(x, Tensor) and x.is_cuda:
                raise ValueError(f"the emulator takes CPU tensors, got one on {x.device}")
        run = self.library[f"run_{name}"]
        run.restype = ctypes.c_char_p
        found = []
        for order in range(2):
            fenced = Fenced([x for x in arguments if isinstance(x, Tensor)], at_first=order == 1)
            data = packed([fenced.address(x) if isinstance(x, Tensor) else x for x in arguments])
            error = run(data, ctypes.c_size_t(len(data)), (ctypes.c_int * 3)(*grid), threads, shared_bytes, order)
            if error:
                raise RuntimeError(f"{name}: {error.decode()}")
            found.append(fenced.contents())
        if found[0] != found[1]:
            raise RuntimeError(f"{name}: threads in another order, or memory around the tensors, give other bits")
        for address, content in found[0].items():
            ctypes.memmove(address, content, len(content))


def compiled(source: Path, defines: dict[str, int | str]) -> Module:
    """Compile all kernels of a .cu file, once for each set of defines."""
    return _compiled(source.resolve(), tuple(sorted(defines.items())))


def launch(
    source: Path, name: str, defines: Defines, grid: Grid, threads: int, shared: int, arguments: Sequence[Argument]
) -> None:
    """What stands in for `nvrtc.launch` on a CPU; see the fixture `emulated`."""
    compiled(source, dict(defines)).launch(name, grid, threads, shared, list(arguments))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="trope-emulator-")  # removed when Python ends


@functools.cache
def _compiled(source: Path, defines: tuple[tuple[str, int | str], ...]) -> Module:
    folder = Path(tempfile.mkdtemp(dir=_folder().name))
    names = dict.fromkeys(KERNEL.findall(source.read_text()))
    unit, library = folder / "unit.cpp", folder / "unit.so"
    unit.write_text(f'#include "{source}"\n' + "".join(WRAPPER.format(name=name) for name in names))
    command = ["g++", *OPTIONS.split(), *(f"-D{name}={value}" for name, value in defines)]
    command += [f"-I{HERE}", f"-I{KERNELS}", str(unit), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"g++ cannot compile {source}\n{result.stderr}")
    return Module(ctypes.CDLL(str(library)))
