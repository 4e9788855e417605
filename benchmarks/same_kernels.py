"""Whether two checkouts compile the same GPU code, for sm_90 and without a GPU.

python benchmarks/same_kernels.py --code OLD --out before.json
python benchmarks/same_kernels.py --code . --out after.json --against before.json

A refactoring of trope/kernels must print "the same kernels". Of Triton, launches, their grids and the PTX (without line
numbers and the kernel's name) are equal. With TROPE_NVRTC=build/nvrtc-VERSION (`make test-compile`) the instructions of
every kernel in CUDA C++ are equal, too, whichever file it is in. Tensors are on the CPU and nothing is run, so results
are not compared; the tests do that. Takes two minutes. tests/test_kernels_compile.py runs it, so that a kernel which no
GPU can have does not land.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from cuda_code import disassembled, machine_code, nvrtc_in, variants

SHARED_BYTES = 232_448  # of a program on a Hopper GPU; a launch that asks for more fails, and only there
SKIPPED = re.compile(r"(?m)^\s*//.*$")  # comments, and with them the path of the source


class NoGPU:
    """Stands in for Triton's driver: says what to compile for, and can run nothing."""

    class utils:  # Triton's own name
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": SHARED_BYTES}

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def record(launches: list[list[Any]]) -> None:
    """From now on every launch compiles, is written down and does nothing else."""
    import triton
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(NoGPU())
    CUDABackend.make_cubin = lambda *_: b""  # PTX is enough, and assembling it takes most of the time
    compile_and_run = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = compile_and_run(self, *args, grid=grid, warmup=True, **options)
        if kernel.metadata.shared > SHARED_BYTES:
            sys.exit(f"{self.fn.__name__} takes {kernel.metadata.shared:,} bytes of shared memory: no GPU has as many")
        ptx = SKIPPED.sub("", kernel.asm["ptx"]).replace(self.fn.__name__, "kernel")
        launches.append([self.fn.__name__, list(grid), hashlib.sha256(ptx.encode()).hexdigest()])
        return kernel

    JITFunction.run = run


def launch_everything() -> None:
    """Each operator in a few shapes and options, forward and backward, as on a GPU."""
    import torch

    from trope.kernels import backend, rotate_qk

    backend.resolve_backend = lambda chosen, x: "triton"
    for name, module in list(sys.modules.items()):
        if name.startswith("trope.") and hasattr(module, "resolve_backend"):
            module.resolve_backend = backend.resolve_backend
    from trope.kernels import attention
    from trope.kernels.adamw import Moved, factors_of, move
    from trope.kernels.batch import BatchShape, Source, gather_batch
    from trope.kernels.causal_attention import causal_attention
    from trope.kernels.divergence import Squares, Watched, watch
    from trope.kernels.embed import embed, embed_backward
    from trope.kernels.gradient_buffer import GradientBuffer
    from trope.kernels.norm import gate, norm
    from trope.kernels.project import project
    from trope.kernels.ranking import Catalogue, places
    from trope.kernels.ranking import triton as ranking_triton
    from trope.kernels.readout import Curve, add_turned
    from trope.kernels.sequence_bounds import SequenceBounds
    from trope.kernels.silu_rotate import Turns, silu_rotate
    from trope.kernels.softmax import draw_uniform, sampled_softmax
    from trope.kernels.split_rotate import split_rotate
    from trope.kernels.swiglu import swiglu
    from trope.kernels.table import InputEntries, ScoreEntries, invert, table_gradient, unit_vectors, update_table

    # The tile of a GPU, though the tensors are on the CPU.
    ranking_triton._tile = lambda x: {"BLOCK_S": 128, "BLOCK_V": 256, "BLOCK_E": 64, "WIDEN": False}
    torch.manual_seed(0)
    low, seed = torch.bfloat16, torch.tensor([4])

    def learned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape).to(dtype).requires_grad_()

    for B, L, H, D, P, C, interleaved, paper, dtype in [
        (2, 7, 4, 128, 64, 1, True, False, low),
        (2, 7, 8, 32, 16, 2, False, False, low),
        (2, 7, 3, 30, 10, 1, True, True, torch.float32),
    ]:
        joint, coords = learned(B, L, 2, H, D, dtype=dtype), torch.randint(0, 10**9, (C, B, L))
        freqs = [learned(C, P, dtype=torch.float32 if paper else torch.float64) for _ in range(2)]
        betas = torch.ones(P) if paper else None
        turned = rotate_qk(joint[:, :, 0], joint[:, :, 1], coords, coords, *freqs, betas, interleaved)
        sum(x.float().sum() for x in turned).backward()

    for H, D, P, C, kind, interleaved, dtype in [
        (4, 128, 64, 1, "linear", True, low),
        (8, 32, 16, 2, "frequencies", False, low),
        (3, 30, 10, 1, "paper", True, torch.float32),
        (4, 64, 32, 1, "none", True, low),
    ]:
        T, pre = 40, learned(40, 4 * H * D, dtype=dtype)
        coords = torch.randint(0, 10**9, (C, T))
        wide = [torch.randn(C, P, dtype=torch.float64) for _ in range(2)]
        turns = {
            "linear": Turns(*wide, *wide, learned(P), learned(P), torch.tensor(5)),
            "frequencies": Turns(*(x.clone().requires_grad_() for x in wide)),
            "paper": Turns(*(x.float().requires_grad_() for x in wide), betas=torch.ones(P)),
            "none": None,
        }[kind]
        where, buffer = (None if turns is None else coords), GradientBuffer(4 * H * D)
        u, v, q, k = silu_rotate(pre, H, where, where, turns, interleaved, buffer)
        gated = gate(v.flatten(1), u.flatten(1), 0.2, seed, 5, buffer=buffer)
        (gated.float().sum() + (q * k).float().sum()).backward()
        for slots, rows in ((None, None), (torch.arange(T) + 3, T + 5)):
            joint = learned(T, 3 * H * D, dtype=dtype)
            q, k, v = split_rotate(joint, H, where, where, turns, interleaved, slots, rows)
            (q * k + v).float().sum().backward()

    for budget in (1 << 28, 0):
        attention.CACHE_BYTES = budget
        for B, L, H, D, has_position, has_time, dtype, is_jagged in [
            (3, 200, 4, 128, True, True, low, True),
            (3, 70, 8, 32, True, True, low, False),
            (3, 50, 2, 30, False, True, torch.float32, True),
            (2, 130, 2, 64, True, False, low, False),
            (2, 64, 2, 64, False, False, low, True),
            (2, 50, 4, 128, True, True, low, False),
            (1, 1, 1, 16, True, True, low, True),
            # The widest heads that the kernels take (attention.widest_head).
            (2, 70, 1, 256, True, True, low, True),
            (2, 70, 1, 128, True, True, torch.float32, True),
        ]:
            lengths = torch.tensor([L, L // 2 + 1, 3][:B])
            offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            bounds = SequenceBounds.jagged(offsets, L) if is_jagged else SequenceBounds.padded(lengths, L)
            T = int(offsets[-1]) if is_jagged else B * L
            qkv, times = learned(T, 3, H, D, dtype=dtype), torch.randint(0, 10**6, (T,)).sort()[0]
            position, time = learned(2 * L - 1) if has_position else None, learned(129) if has_time else None
            gaps = attention.time_gaps(times, times, bounds, 128, qkv) if has_time else None
            attention.hstu_attention(*qkv.unbind(1), bounds, L, position, time, gaps).float().sum().backward()
            with torch.no_grad():
                attention.hstu_attention(*qkv.unbind(1), bounds, L, position, time, gaps)

    for L, H, D, dropout, dtype in ((50, 4, 128, 0.2, low), (64, 2, 30, 0.0, low), (9, 1, 128, 0.2, torch.float32)):
        qkv = [learned(2, L, H, D, dtype=dtype) for _ in range(3)]
        causal_attention(*qkv, dropout, seed if dropout else None, backend="triton").float().sum().backward()

    for E in (64, 512, 50):
        x, delta = learned(9, E), learned(9, E, dtype=low)
        new, normed = norm(x, delta)
        (new.sum() + normed.float().sum()).backward()
        norm(x)[1].float().sum().backward()
        new, normed = norm(x, delta, rms=True, dropout=0.2, seed=seed, stream=3)
        (new.sum() + normed.float().sum()).backward()
    for F in (1376, 48):
        swiglu(learned(33, 2 * F, dtype=low)).float().sum().backward()
    project(learned(33, 64, dtype=low), learned(64, 48), learned(48)).float().sum().backward()
    for E, P in ((512, 8), (50, 25)):
        freqs_P, moments = learned(P, dtype=torch.float64), torch.arange(33)
        ends = (torch.tensor(15), torch.tensor(-10), torch.tensor(10))
        curve = Curve(freqs_P.detach(), torch.rand(P, dtype=torch.float64), learned(P), *ends)
        for start in (learned(33, E), torch.randn(33, E)[:, : 2 * P].requires_grad_()):
            add_turned(learned(33, E), learned(33, E, dtype=low), start, moments, curve).sum().backward()
        add_turned(learned(33, E), None, None, moments, Curve(freqs_P)).sum().backward()

    for E, V, C in ((512, 1000, 129), (128, 70000, 5), (50, 30, 3)):
        T, items, table = 64, torch.randint(0, V, (64,), dtype=torch.int32), torch.randn(V + 1, E)
        embed(items, torch.arange(T, dtype=torch.int32), table, torch.randn(T, E), 2.0, 0.2, seed, 3)
        sequence = (torch.tensor([0]), torch.tensor([T]))
        for first in (None, torch.randn(T, E // 4)):
            embed_backward(torch.randn(T, E), items, *sequence, T, 0.2, seed, 3, grad_first_TF=first)
        candidates = torch.zeros(T, C, dtype=torch.int32)
        draw_uniform(V, seed, candidates)
        candidates.random_(1, V)
        unit = unit_vectors(table, low)
        found = sampled_softmax(torch.randn(T, E).to(low), candidates, unit, torch.ones(1), 0.05)
        scores = ScoreEntries(*invert(candidates, V), found.coefs_TC, found.out_TE)
        inputs = InputEntries(items, *invert(items, V), torch.randn(T, E), 2.0)
        table_gradient(table, scores, inputs)
        for second in (torch.zeros(V + 1, E), torch.zeros(V + 1)):
            for part in ("all", "others", "inputs"):
                arguments = (table, torch.zeros(V + 1, E), second, unit, scores, inputs, factors_of(torch.ones(6)))
                update_table(*arguments, part=part)

    matrices = [torch.randn(70, 50) for _ in range(4)]
    tensors = [Moved(*matrices, low) for low in (None, torch.zeros(70, 50, dtype=low))]
    parts = move(tensors, factors_of(torch.ones(6)))
    move([*tensors, Moved(*(torch.randn(1) for _ in range(4)), None)], factors_of(torch.ones(6)))
    watch(torch.tensor(1.0), torch.ones(17), Watched.begin(0, 17, torch.device("cpu")))
    watch(torch.tensor(1.0), None, Watched.begin(0, 17, torch.device("cpu")), parts, Squares(3, torch.ones(6400), None))
    windows = (torch.tensor([0, 40]), torch.tensor([30, 80]), torch.tensor([0, 1]))
    source = Source(torch.arange(100, dtype=torch.int32), torch.arange(100), *windows)
    for given in (source, source._replace(following=torch.arange(100))):
        gather_batch(given, BatchShape(2, 50, 80, 9, 1), torch.zeros(1, dtype=torch.long))
    for E in (512, 50):
        left_out = (torch.tensor([3, 4]), torch.tensor([0, 1, 2, 2, 2, 2]))
        catalogue = Catalogue.of(torch.randn(400, E))
        places(torch.randn(5, E), catalogue, torch.arange(5), torch.arange(1, 6), *left_out)


def compile_cuda(root: Path, folder: Path, launches: list[list[Any]]) -> None:
    """Write down every kernel in CUDA C++ in each of its variants, compiled by the NVRTC in a folder."""
    found: list[list[Any]] = []
    with nvrtc_in(folder):
        for source, defines in variants(root):
            for name, code in disassembled(machine_code(source, defines, "sm_90a")).items():
                assert code, f"no instruction of {name} was found"
                found.append([name, defines, hashlib.sha256(code.encode()).hexdigest()])
    launches += sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--code", type=Path, required=True, help="root of the checkout")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--against", type=Path, help="JSON file of another checkout")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.code.resolve()))
    os.environ.pop("TRITON_INTERPRET", None)  # the interpreter compiles nothing
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    launches: list[list[Any]] = []
    record(launches)
    launch_everything()
    import triton

    kernels = len({name for name, _, _ in launches})
    print(f"{len(launches)} launches of {kernels} kernels, Triton {triton.__version__}")
    if "TROPE_NVRTC" in os.environ:
        before = len(launches)
        compile_cuda(arguments.code.resolve(), Path(os.environ["TROPE_NVRTC"]).resolve(), launches)
        print(f"and {len(launches) - before} variants of kernels in CUDA C++")
    arguments.out.write_text(json.dumps(launches, indent=0))
    if arguments.against is None:
        return
    earlier, launches = (json.loads(path.read_text()) for path in (arguments.against, arguments.out))
    changed = sorted({old[0] for old, new in zip(earlier, launches, strict=False) if old[1:] != new[1:]})
    if len(earlier) != len(launches):
        sys.exit(f"{len(earlier)} launches before, {len(launches)} now")
    if changed:
        sys.exit("compiled or launched differently: " + ", ".join(changed))
    print("the same kernels")


if __name__ == "__main__":
    main()
