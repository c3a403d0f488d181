"""What the machine code of a launch must hold, and the exceptions that stand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from greenroom.core.layout import PLAIN
from tests.offline_gpu.compiler import Findings
from tests.offline_gpu.launches import Launch

EXCEPTIONS = Path(__file__).with_name("exceptions.txt")
REGISTERS = 65536  # of a multiprocessor
# Bytes of shared memory that a program can have, and that a multiprocessor has.
SHARED = {
    80: (163 << 10, 164 << 10),
    89: (99 << 10, 100 << 10),
    90: (227 << 10, 228 << 10),
    100: (227 << 10, 228 << 10),
    120: (99 << 10, 100 << 10),
}
RESERVED = 1 << 10  # bytes of shared memory that the system takes for a program
LANE_INSTRUCTIONS = {
    PLAIN: 3.0,
    **dict.fromkeys(("q8_0", "int8", "fp8", "symmetric8", "affine8"), 5.0),
}
LANE_INSTRUCTIONS_OF_OTHERS = 8.0  # encodings of less than 8 bits
PROGRAMS = 2  # of one token, on a multiprocessor


def measures(
    launch: Launch, found: Findings, architecture: int
) -> Iterator[tuple[str, float, float]]:
    """Yield what is held against a limit: its name, what was found, and the most there may be."""
    role = launch.label.split()[0]
    program, multiprocessor = SHARED[architecture]
    yield "spills in loops", found.spills, 0
    yield "shared memory", found.shared, program
    if role == "sum":
        return
    yield "byte loads in loops", found.byte_loads, 0
    if role == "one":
        registers = -(-found.registers // 8) * 8 * found.threads * PROGRAMS
        yield "registers of two programs", registers, REGISTERS
        shared = (found.shared + RESERVED) * PROGRAMS
        yield "shared memory of two programs", shared, multiprocessor
        narrow = max(0, found.code_bytes - found.wide_bytes)
        yield "code bytes in narrow loads", narrow, 0
        most = LANE_INSTRUCTIONS.get(launch.encoding, LANE_INSTRUCTIONS_OF_OTHERS)
        yield "lane instructions a weight", round(found.lane_instructions, 2), most
    else:
        wanted = "HGMMA" if (role, architecture) == ("many", 90) else "MMA"
        missing = not any(wanted in each for each in found.tensor_cores)
        yield "products without tensor cores", float(missing), 0
    if launch.options.get("num_stages", 1) > 1:
        yield "stages without asynchronous copies", float(not found.asynchronous), 0


def exceptions() -> dict[tuple[str, str, str], float]:
    """The bounds that replace a limit, by encoding, role and name of the measure."""
    bounds = {}
    for line in EXCEPTIONS.read_text().splitlines():
        if line and not line.startswith("#"):
            encoding, label, measure, bound = (part.strip() for part in line.split("|"))
            bounds[encoding, label, measure] = float(bound)
    return bounds
