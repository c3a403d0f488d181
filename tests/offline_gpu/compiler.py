"""Compile recorded launches to a GPU's machine code, as Triton does, and keep what was compiled.

Triton brings an assembler and a disassembler, so neither a CUDA toolkit nor a GPU is needed. Most
of the time goes to Triton's passes, so what they make is shared: the representation of a program
before registers and layouts (TTIR) is that of all architectures, and the one with layouts (TTGIR)
is that of several.
"""

from __future__ import annotations

import base64
import gc
import gzip
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from greenroom.core.layout import PLAIN
from tests.offline_gpu import elf
from tests.offline_gpu.launches import Launch
from tests.offline_gpu.listing import Listing, read_functions

FOLDER = Path(__file__).parents[2] / "build" / "offline-gpu"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
LANES = 32
# Architectures with the same TTGIR; of programs with up to 16 rows, whose products are those of a
# warp everywhere, more have the same. `test_compiler.py` holds both.
FAMILY = {80: 80, 89: 80, 90: 90, 100: 100, 120: 120}
NARROW_FAMILY = {80: 80, 89: 80, 90: 80, 100: 100, 120: 100}
NARROW = ("one", "few")  # the first words of the labels of these programs
RAW_NAMES = {80: "SM80", 89: "SM89", 90: "SM90a", 100: "SM100a", 120: "SM120a"}  # of nvdisasm


@dataclass(frozen=True)
class Code:
    """What Triton's compiler makes of a launch.

    shared: bytes of shared memory of a program
    threads: of a program
    """

    ptx: str
    cubin: bytes
    shared: int
    threads: int


@dataclass(frozen=True)
class Specialization:
    """What Triton compiles for a launch, and keys of it."""

    source: ASTSource
    options: Any
    target: GPUTarget
    key: str
    program: str  # the same for all architectures


def specialize(launch: Launch, architecture: int) -> Specialization:
    """Find what Triton compiles for a launch."""
    target = GPUTarget("cuda", architecture, LANES)
    backend = make_backend(target)
    function = launch.function
    binder = create_function_from_signature(function.signature, function.params, backend)
    bound, kinds, options = binder(*launch.args, debug=False, **launch.options)
    given = {name: options[name] for name in sorted(options)}
    options, signature, constants, attributes = function._pack_args(
        backend, dict(launch.options), bound, kinds, options
    )
    source = ASTSource(function, signature, constants, attributes)
    program = repr((source.hash(), given, triton.__version__))
    key = _digest(program, options.hash(), str(architecture))
    return Specialization(source, options, target, key, _digest(program))


def compile_launch(launch: Launch, architecture: int) -> Code:
    """Compile a launch, or take what an earlier run compiled."""
    special = specialize(launch, architecture)
    file = FOLDER / "code" / special.key
    if not file.exists():
        # Of plain weights in bfloat16, sm_90 has other layouts.
        narrow = launch.label.split()[0] in NARROW and launch.encoding != PLAIN
        family = (NARROW_FAMILY if narrow else FAMILY)[architecture]
        code = _compile(special, architecture, family)
        write(file, code.__dict__ | {"cubin": base64.b64encode(code.cubin).decode()})
    stored = read(file)
    return Code(**stored | {"cubin": base64.b64decode(stored["cubin"])})


def _compile(special: Specialization, architecture: int, family: int) -> Code:
    """Run the stages of Triton's compiler."""
    backend, options = make_backend(special.target), special.options
    stages: dict[str, Callable[[Any, Any], Any]] = {}
    backend.add_stages(stages, options, special.source.language)
    facts = {"target": special.target, **vars(options)}
    gc.disable()  # the compiler's many objects would be searched again and again
    try:
        text = layouts_of(special, family)
        module = parse(text.replace(f"cuda:{family}", f"cuda:{architecture}"), backend)
        llvm = stages["llir"](module, facts)
        ptx = stages["ptx"](llvm, facts)
        cubin = stages["cubin"](ptx, facts)
    finally:
        gc.enable()
    return Code(ptx, cubin, int(facts["shared"]), int(facts["num_warps"]) * LANES)


def layouts_of(special: Specialization, family: int) -> str:
    """Return the TTGIR of a launch, which the first architecture of a family has made."""
    backend = make_backend(GPUTarget("cuda", family, LANES))
    file = FOLDER / "ir" / f"{special.program}-{family}"
    if not file.exists():
        own = backend.parse_options(vars(special.options) | {"arch": f"sm{family}"})
        stages: dict[str, Callable[[Any, Any], Any]] = {}
        backend.add_stages(stages, own, special.source.language)
        facts = {"target": backend.target, **vars(own)}
        module = parse(_program_of(special, backend, own, stages), backend)
        write(file, stages["ttgir"](module, facts).str())
    text: str = read(file)
    return text


def _program_of(special: Specialization, backend: Any, options: Any, stages: Any) -> str:
    """Return the TTIR of a launch."""
    file = FOLDER / "ir" / special.program
    if not file.exists():
        context = _context(backend)
        codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        module = special.source.make_ir(backend.target, options, codegen, modules, context)
        write(file, stages["ttir"](module, {}).str())
    text: str = read(file)
    return text


def parse(text: str, backend: Any) -> Any:
    """Parse TTIR or TTGIR."""
    context = _context(backend)
    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
        file.write(text)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    return module


def _context(backend: Any) -> Any:
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return context


def disassemble(cubins: Sequence[bytes], architecture: int) -> list[Listing]:
    """Disassemble cubins of one function each.

    One call does it for all: the disassembler takes 0.3 seconds to start, 0.01 for a function.
    """
    functions = [elf.function(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(functions))
        file.flush()
        text = run("nvdisasm", "--no-dataflow", "--binary", RAW_NAMES[architecture], file.name)
    return read_functions(text, [len(each) for each in functions])


def registers(cubin: bytes) -> int:
    """Return the registers of a lane."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = run("cuobjdump", "-res-usage", file.name)
    found = re.search(r"REG:(\d+)", usage)
    assert found, usage
    return int(found[1])


def run(tool: str, *arguments: str) -> str:
    """Run one of Triton's tools and return what it prints."""
    return subprocess.run(
        [TOOLS / tool, *arguments], check=True, capture_output=True, text=True
    ).stdout


def write(file: Path, content: Any) -> None:
    """Write a file of FOLDER as a whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as out:
        out.write(gzip.compress(json.dumps(content).encode(), 1))
    Path(out.name).replace(file)


def read(file: Path) -> Any:
    """Read what `write` wrote."""
    return json.loads(gzip.decompress(file.read_bytes()))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32]
