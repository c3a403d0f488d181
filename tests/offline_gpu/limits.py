"""What the machine code of a launch must hold, and the exceptions that stand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from greenroom.core.layout import PLAIN
from tests.offline_gpu.findings import Findings
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
    **dict.fromkeys(("q8_0", "int8", "fp8", "symmetric8", "affine8", "signed8"), 5.0),
}
LANE_INSTRUCTIONS_OF_OTHERS = 8.0  # encodings of less than 8 bits
LARGE = 128  # rows of a tile that has a multiprocessor to itself; of others it has two
# Operations on tensor cores by rows of a tile. Those of sm_90 and sm_100 that read shared memory
# need 64 rows at least. Others have the operation of a warp, HMMA.
LARGE_PRODUCTS = {90: "HGMMA", 100: "UTCHMMA"}


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
    rows = launch.options.get("M", 1)
    programs = 1 if rows >= LARGE else 2
    registers = -(-found.registers // 8) * 8 * found.threads * programs
    yield "registers of the programs of a multiprocessor", registers, REGISTERS
    if role == "one":
        shared = (found.shared + RESERVED) * programs
        yield "shared memory of two programs", shared, multiprocessor
        most = LANE_INSTRUCTIONS.get(launch.encoding, LANE_INSTRUCTIONS_OF_OTHERS)
        yield "lane instructions a weight", round(found.lane_instructions, 2), most
    else:
        wanted = LARGE_PRODUCTS.get(architecture, "HMMA") if rows >= 64 else "HMMA"
        yield "products without tensor cores", float(wanted not in found.tensor_cores), 0
    if launch.options.get("num_stages", 1) > 1:
        needed = found.code_bytes + found.input_bytes
        yield "bytes in other than wide asynchronous copies", max(0, needed - found.copied_bytes), 0
    else:
        # Inputs are loaded by 64 bits; those that are not so take wide loads from the codes.
        wide = found.wide_bytes - max(0, found.input_bytes - found.double_bytes)
        yield "code bytes in narrow loads", max(0, found.code_bytes - wide), 0


def exceptions() -> dict[tuple[str, int, str, str], float]:
    """The bounds that replace a limit, by encoding, architecture, role and name of the measure."""
    bounds = {}
    for line in EXCEPTIONS.read_text().splitlines():
        if line and not line.startswith("#"):
            encoding, of, label, measure, bound = (part.strip() for part in line.split("|"))
            bounds[encoding, int(of), label, measure] = float(bound)
    return bounds
