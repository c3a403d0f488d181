"""Compile recorded launches for a GPU's compute capability, and keep the findings.

Triton brings an assembler and a disassembler, so neither a CUDA toolkit nor a GPU is needed.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tests.offline_gpu import listing
from tests.offline_gpu.launches import Launch
from tests.offline_gpu.listing import read_listing

FOLDER = Path(__file__).parents[2] / "build" / "offline-gpu"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
LANES = 32
TENSOR_CORES = ("HMMA", "HGMMA", "UTCHMMA")


@dataclass(frozen=True)
class Findings:
    """What the machine code of a function holds.

    threads: of a program
    spills: loads and stores of spilled registers in loops
    byte_loads: loads of a byte in loops
    wide_bytes: bytes that a lane loads by 128 bits in a turn of the main loop
    code_bytes: bytes of codes that a lane needs in a turn of the main loop; only for one token
    asynchronous: asynchronous copies to shared memory in loops
    tensor_cores: the operations on tensor cores in loops
    lane_instructions: instructions of a lane for each weight; only for one token
    """

    registers: int
    shared: int
    threads: int
    spills: int
    byte_loads: int
    wide_bytes: int
    code_bytes: int
    asynchronous: int
    tensor_cores: tuple[str, ...]
    lane_instructions: float


def specialize(launch: Launch, architecture: int) -> tuple[str, ASTSource, dict[str, Any]]:
    """Find what Triton compiles for a launch: a key, the source and its options."""
    target = GPUTarget("cuda", architecture, LANES)
    backend = make_backend(target)
    function = launch.function
    binder = create_function_from_signature(function.signature, function.params, backend)
    bound, kinds, options = binder(*launch.args, debug=False, **launch.options)
    options, signature, constants, attributes = function._pack_args(
        backend, dict(launch.options), bound, kinds, options
    )
    source = ASTSource(function, signature, constants, attributes)
    code = b"".join((Path(__file__).parent / f).read_bytes() for f in ("compiler.py", "listing.py"))
    text = repr((source.hash(), options.hash(), architecture, triton.__version__))
    return hashlib.sha256(text.encode() + code).hexdigest()[:32], source, dict(vars(options))


def examine(launch: Launch, architecture: int) -> Findings:
    """Compile a launch and read its machine code, or take what an earlier run found."""
    key, source, options = specialize(launch, architecture)
    file = FOLDER / f"{key}.json"
    if not file.exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = triton.compile(
                source, target=GPUTarget("cuda", architecture, LANES), options=options
            )
        findings = find(launch, compiled)
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=FOLDER, delete=False) as out:
            json.dump(asdict(findings), out)
        Path(out.name).replace(file)
    stored = json.loads(file.read_text())
    return Findings(**stored | {"tensor_cores": tuple(stored["tensor_cores"])})


def find(launch: Launch, compiled: Any) -> Findings:
    """Read the machine code of a compiled launch."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        sass = read_listing(run("nvdisasm", "-c", cubin.name))
        usage = run("cuobjdump", "-res-usage", cubin.name)
    found = re.search(r"REG:(\d+)", usage)
    assert found, usage
    ptx = read_listing(compiled.asm["ptx"])
    loads = listing.loaded_bytes(sass.main_loop, "LDG", "LDGSTS")
    one = launch.label.startswith("one")
    each_turn = listing.turns(sass, ptx) * weights(launch) if one else 0.0
    return Findings(
        registers=int(found[1]),
        shared=int(compiled.metadata.shared),
        threads=int(compiled.metadata.num_warps) * LANES,
        spills=listing.count(sass.in_loops, "LDL", "STL"),
        byte_loads=listing.loaded_bytes(sass.in_loops, "LDG", "LDS")[1],
        wide_bytes=sum(n for width, n in loads.items() if width >= 16),
        code_bytes=round(each_turn * launch.bits / 8),
        asynchronous=listing.count(sass.in_loops, "LDGSTS", "UTMALDG", "UBLKCP"),
        tensor_cores=tuple(
            sorted(
                {op for each in sass.in_loops if (op := listing.operation(each)) in TENSOR_CORES}
            )
        ),
        lane_instructions=listing.lane_instructions(sass.main_loop, each_turn) if one else 0.0,
    )


def weights(launch: Launch) -> float:
    """The weights that a lane multiplies in an iteration of the main loop."""
    options = launch.options
    matrices, lanes = 2 if options["GATED"] else 1, LANES * options.get("num_warps", 4)
    inputs = options["K"] if "K" in options else options["C"] * options["CHUNK"]
    return matrices * options["N"] * inputs / lanes


def run(tool: str, *arguments: str) -> str:
    """Run one of Triton's tools and return what it prints."""
    return subprocess.run(
        [TOOLS / tool, *arguments], check=True, capture_output=True, text=True
    ).stdout
