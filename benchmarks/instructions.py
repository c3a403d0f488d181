"""Machine instructions a weight of the compiled products with encoded matrices.

    python benchmarks/instructions.py [--encodings NAME ...]

Counts instructions of loops in the machine code, so that a loaded machine gives the same figures.
The processor is this one, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES are set.

integers: product of four rows with one token's inputs as integers
scales:   preparation of the scales for it
decoded:  the same product with weights decoded in registers
rows:     decoding for many tokens
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator

from numba import types
from numba.core import sigutils
from numba.core.ccallback import CFunc

from greenroom.runtime.kernels.codegen.formats import encoded
from greenroom.runtime.kernels.codegen.formats.codes import INTEGERS
from greenroom.runtime.kernels.codegen.formats.families import FORMATS
from greenroom.runtime.kernels.codegen.formats.tile import UNIT
from greenroom.runtime.kernels.codegen.jit import WITNESS
from greenroom.runtime.kernels.codegen.llvm.target import COLUMNS, ROW_BY_ROW

NUMBERS = {"xmm": 4, "ymm": 8, "zmm": 16}  # of float32 in a register


def functions(encoding: str, integers: bool) -> dict[str, list[str]]:
    """Lines of the shared functions in a product's machine code, by their names."""
    enter = encoded.product(WITNESS["float32"], encoding, 0, integers)
    signature = sigutils.normalize_signature(types.void(types.voidptr))
    compiled = CFunc(enter, signature, locals={}, options={})
    compiled.compile()
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in compiled._library.get_asm_str().splitlines():
        if match := re.match(r'"?greenroom\.([\w.]+)"?:', line):
            lines = found.setdefault(match[1], [])
        elif line.startswith(".Lfunc_end"):
            lines = []
        else:
            lines.append(line)
    return found


def loops(lines: list[str]) -> Iterator[list[str]]:
    """The instructions of each innermost loop of a function."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    spans: list[range] = []
    for line in lines:
        if match := re.match(r"(\.L\w+):", line):
            labels[match[1]] = len(instructions)
        elif re.match(r"\t[a-z]", line):
            instructions.append(line.strip())
            jump = re.match(r"j\w+\s+(\.L\w+)", instructions[-1])
            if jump and jump[1] in labels:
                spans.append(range(labels[jump[1]], len(instructions)))
    for span in spans:
        if not any(each != span and each[0] >= span[0] and each[-1] <= span[-1] for each in spans):
            yield [instructions[i] for i in span]


def main_loop(
    found: dict[str, list[str]], function: str, weigh: Callable[[list[str]], int]
) -> list[str]:
    """The loop of a function that does most; of those, the shortest.

    Others are the same loop with sums of blocks of 64 inputs, and a row's last inputs.
    """
    lines = next(lines for name, lines in found.items() if name.startswith(function))
    return max(loops(lines), key=lambda loop: (weigh(loop), -len(loop)))


def count_of(instruction: str) -> Callable[[list[str]], int]:
    """A function that counts an instruction in a loop."""
    return lambda loop: sum(instruction in line for line in loop)


def stored(loop: list[str]) -> int:
    """Count the float32 that a loop stores outside of the stack."""
    total = 0
    for line in loop:
        if match := re.match(r"v(mov|extract)\S*\s.*%([xyz]mm)\d+, (?!.*%rsp)[^%]*\(", line):
            total += NUMBERS[match[2]] // (2 if match[1] == "extract" else 1)
    return total


def row(encoding: str) -> list[float | None]:
    """Instructions a weight, in the order of the table's columns."""
    form, product, scales = FORMATS[encoding].integers, None, None
    if INTEGERS and form is not None:
        found = functions(encoding, True)
        rows = 1 if ROW_BY_ROW and form.row_by_row else COLUMNS
        loop = main_loop(found, f"integer{COLUMNS}.", count_of("vpdp"))
        product = len(loop) / (rows * form.unit)
        loop = min(
            loops(found[f"prepare_times.{encoding}"]),
            key=lambda each: len(each) / max(1, stored(each)),
        )
        each = 2.0**-form.shift + len(form.minima) / form.unit  # float32 that a weight needs
        scales = len(loop) * each / stored(loop)
    found = functions(encoding, False)
    tile = main_loop(found, "tile.", count_of("vfmadd"))
    rows_loop = main_loop(found, "expand.", stored)
    return [product, scales, len(tile) / (COLUMNS * UNIT), len(rows_loop) / stored(rows_loop)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [name for name, form in FORMATS.items() if form.integers is not None]
    parser.add_argument("--encodings", nargs="+", metavar="NAME", choices=FORMATS, default=names)
    columns = ("integers", "scales", "decoded", "rows")
    print(f"{'encoding':17}", *(f"{column:>9}" for column in columns), sep="")
    for encoding in parser.parse_args().encodings:
        figures = ("-" if figure is None else f"{figure:.3f}" for figure in row(encoding))
        print(f"{encoding:17}", *(f"{figure:>9}" for figure in figures), sep="", flush=True)


if __name__ == "__main__":
    main()
