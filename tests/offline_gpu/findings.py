"""What the machine code of recorded launches holds, kept by content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.offline_gpu import compiler, listing
from tests.offline_gpu.compiler import LANES, Code
from tests.offline_gpu.launches import Launch
from tests.offline_gpu.listing import Listing, read_ptx

TENSOR_CORES = ("HMMA", "HGMMA", "UTCHMMA")
WIDE = 16  # bytes of the widest load of a lane, or more
# What findings depend on, besides machine code.
SOURCES = ("findings.py", "listing.py", "launches.py", "elf.py", "compiler.py")


@dataclass(frozen=True)
class Findings:
    """What the machine code of a function holds.

    threads: of a program
    spills: loads and stores of spilled registers in loops
    byte_loads: loads of a byte in loops
    wide_bytes: bytes that a lane loads by 128 bits in a turn of the main loop
    double_bytes: bytes that it loads by 64 bits
    copied_bytes: those of `wide_bytes` that are copied to shared memory meanwhile
    code_bytes: bytes of codes that a lane needs in a turn of the main loop
    input_bytes: bytes of the experts' inputs that a lane needs in it
    tensor_cores: the operations on tensor cores in loops
    lane_instructions: instructions of a lane for each weight; only for one token
    """

    registers: int
    shared: int
    threads: int
    spills: int
    byte_loads: int
    wide_bytes: int
    double_bytes: int
    copied_bytes: int
    code_bytes: int
    input_bytes: int
    tensor_cores: tuple[str, ...]
    lane_instructions: float


def examine(launches: Sequence[Launch], architecture: int) -> list[Findings]:
    """Compile launches and read their machine code, or take what an earlier run found."""
    files = [compiler.FOLDER / "findings" / _key(launch, architecture) for launch in launches]
    missing = {file: at for at, file in enumerate(files) if not file.exists()}
    codes = [compiler.compile_launch(launches[at], architecture) for at in missing.values()]
    if codes:
        listings = compiler.disassemble([code.cubin for code in codes], architecture)
        for (file, at), code, sass in zip(missing.items(), codes, listings, strict=True):
            compiler.write(file, asdict(find(launches[at], code, sass)))
    stored = [compiler.read(file) for file in files]
    return [Findings(**each | {"tensor_cores": tuple(each["tensor_cores"])}) for each in stored]


def _key(launch: Launch, architecture: int) -> str:
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in SOURCES)
    text = repr((compiler.specialize(launch, architecture).key, launch.encoding, launch.label))
    return hashlib.sha256(text.encode() + sources).hexdigest()[:32]


def find(launch: Launch, code: Code, sass: Listing) -> Findings:
    """Read the machine code of a compiled launch."""
    loop, ptx = sass.main_loop, read_ptx(code.ptx)
    loads = listing.loaded_bytes(loop, "LDG", "LDGSTS")
    copies = listing.loaded_bytes(loop, "LDGSTS")
    projects = launch.label.split()[-1] in ("up", "down", "segment")
    turns = listing.turns(sass, ptx) if projects else 0
    weights, inputs = of_a_turn(launch) if projects else (0.0, 0.0)
    one = projects and launch.label.startswith("one")
    operations = {listing.operation(each) for each in sass.in_loops}
    return Findings(
        registers=compiler.registers(code.cubin),
        shared=code.shared,
        threads=code.threads,
        spills=listing.count(sass.in_loops, "LDL", "STL"),
        byte_loads=listing.loaded_bytes(sass.in_loops, "LDG", "LDS")[1],
        wide_bytes=sum(n for width, n in loads.items() if width >= WIDE),
        double_bytes=loads[8],
        copied_bytes=sum(n for width, n in copies.items() if width >= WIDE),
        code_bytes=round(turns * weights * launch.bits / 8),
        input_bytes=round(turns * inputs * 2),
        tensor_cores=tuple(sorted(operations.intersection(TENSOR_CORES))),
        lane_instructions=listing.lane_instructions(loop, turns * weights) if one else 0.0,
    )


def of_a_turn(launch: Launch) -> tuple[float, float]:
    """The weights, and the inputs, that a lane loads in an iteration of the main loop.

    In programs for one token each warp loads all inputs, in others the program does.
    """
    options = launch.options
    matrices, lanes = 2 if options["GATED"] else 1, LANES * options.get("num_warps", 4)
    if "K" in options:
        columns, inputs = options["K"], options["M"] * options["K"] / lanes
    else:
        columns = options["C"] * options["CHUNK"]
        inputs = columns / LANES
    return matrices * options["N"] * columns / lanes, inputs
