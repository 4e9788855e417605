"""A program as a file, and back.

| format | file | made by | runs in | loading the file |
|---|---|---|---|---|
| torch | .pt2 | torch.export | PyTorch | can run code: torch reads parts of it with pickle and evaluates expressions |
| aoti | .pt2 | AOTInductor and a C++ compiler | PyTorch, or C++ without Python | runs the machine code in it |
| onnx | .onnx | torch.onnx | ONNX Runtime | reads a graph; no code of the file's runs |

So load `torch` and `aoti` files only from where you would install a program from. The SHA-256 in the manifest finds
damage; whoever can replace a file can replace the manifest too.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from trope.serve.export.programs import Program, limits

Format = Literal["aoti", "onnx", "torch"]
FORMATS: tuple[str, ...] = get_args(Format)
SUFFIXES = {"aoti": ".pt2", "onnx": ".onnx", "torch": ".pt2"}
PACKED_FROM = 512
"""Width from which aoti stores weights as oneDNN reads them fastest. At 512, `remember` of 50 events takes 0.8 of the
time that it takes with MKL, on one Zen 4 core. At 256 both take as long; at 64 oneDNN takes twice MKL's time."""
_TALKATIVE = ("torch.onnx._internal.exporter._registration", "onnxscript.optimizer._constant_folding")
Run = Callable[..., Tensor]
"""A loaded program: its inputs as CPU tensors, in order."""


def check_tools(kind: str) -> None:
    """Refuse a format that this machine cannot make, before minutes are spent."""
    if kind not in FORMATS:
        raise ValueError(f"the format must be one of {', '.join(FORMATS)}, got {kind!r}")
    if kind == "onnx":
        for package in ("onnxruntime", "onnx", "onnxscript"):
            _import(package)
    if kind == "aoti" and compiler() is None:
        raise ValueError(
            "format aoti needs a C++ compiler, found neither $CXX nor g++ nor clang++; install one, or take onnx"
        )


def compiler() -> str | None:
    """The C++ compiler that AOTInductor would take, or None."""
    from torch._inductor import config

    wanted = config.cpp.cxx if isinstance(config.cpp.cxx, (tuple, list)) else (config.cpp.cxx,)
    found = (shutil.which(name) for name in (*wanted, "g++", "clang++") if name)
    return next((path for path in found if path), None)


def trace(program: Program) -> ExportedProgram:
    """The program as a graph with dims that may change."""
    most = limits(program.config.max_len)
    dims = {name: Dim(name, min=least, max=largest) for name, (least, largest) in most.items()}
    shapes = {
        value.name: {axis: dims[dim] for axis, dim in enumerate(value.shape) if isinstance(dim, str)}
        for value in program.inputs
    }
    with _quiet(), torch.no_grad():
        # strict: without it `len(tensor)` becomes a number, and the batch with it.
        return torch.export.export(program, program.example(), dynamic_shapes=shapes, strict=True)


def write(program: Program, kind: str, path: Path) -> None:
    """Write a program to a file of one format."""
    graph = trace(program)
    with _quiet():
        if kind == "torch":
            torch.export.save(graph, path)
        elif kind == "onnx":
            _write_onnx(graph, program, path)
        else:
            _compile(graph, path, is_packed=program.width >= PACKED_FROM)


def load(path: Path, kind: str) -> Run:
    """A program from a file whose SHA-256 the caller has checked; see the table above for what loading trusts."""
    if kind == "onnx":
        return _load_onnx(path)
    with _quiet():
        if kind == "torch":
            return torch.export.load(path).module()
        return _load_compiled(path)


def _write_onnx(graph: ExportedProgram, program: Program, path: Path) -> None:
    _import("onnxscript")
    from trope.serve.export.onnx_integers import TRANSLATIONS

    inputs, output = [value.name for value in program.inputs], program.output.name
    made = torch.onnx.export(
        graph, dynamo=True, input_names=inputs, output_names=[output], verbose=False,
        custom_translation_table=TRANSLATIONS,
    )  # fmt: skip
    assert made is not None
    made.save(path)


def _compile(graph: ExportedProgram, path: Path, is_packed: bool) -> None:
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.exc import CppCompileError

    # The number of threads is the caller's, not that of the machine that exports.
    configs: dict[str, Any] = {"cpp.dynamic_threads": True, "freezing": is_packed}
    try:
        with torch.no_grad():  # with gradients Inductor does not freeze, and does not say so
            aoti_compile_and_package(graph, package_path=str(path), inductor_configs=configs)
    except CppCompileError as error:
        reason = next((line for line in str(error).splitlines() if "error:" in line), "it says no more")
        raise ValueError(f"{compiler()} does not compile the program: {reason}; take another, or onnx") from None


def _load_compiled(path: Path) -> Run:
    from torch._inductor import aoti_load_package  # only now: it takes a second

    # The package's own call parses the inputs' structure as JSON each time, which takes as long as a small model.
    loader = aoti_load_package(str(path)).loader

    def run(*inputs: Tensor) -> Tensor:
        return loader.boxed_run([x.contiguous() for x in inputs])[0]  # compiled code does not look at strides

    return run


def _load_onnx(path: Path) -> Run:
    runtime = _import("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # below errors it comments on its own optimisations
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(*inputs: Tensor) -> Tensor:
        arrays = (x.contiguous().numpy() for x in inputs)
        return torch.from_numpy(session.run(None, dict(zip(names, arrays, strict=True)))[0])

    return run


def _import(package: str) -> Any:
    """An optional package, or one line that names the extra."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise ValueError(f"format onnx needs {package}, which is not installed: pip install 'trope[export]'") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' remarks about themselves: deprecations inside torch, packages that we do not use."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
