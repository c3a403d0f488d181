"""Read machine code (SASS) and PTX: instructions, loops, and how many of each kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

LABEL = re.compile(r"\s*(?P<label>\$?\.?[\w$]+):")
SASS = re.compile(r"\s*/\*(?P<at>[0-9a-f]{4,})\*/\s+(?P<text>[^;]+);")
BRANCH = re.compile(r"\b(?:BRA|bra)\b.*?(?P<label>\$?\.?L[\w$]+|0x[0-9a-f]+)")
PREDICATE = re.compile(r"^@!?%?\w+\s+")
# In PTX and in SASS. Those of sm_100's large tiles are left out: a thread issues them, in branches.
PRODUCT = re.compile(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma|^(?:H|HG|UTCH)MMA")
WIDE = re.compile(
    r"ld\.global[\w.]*\.v(?:8\.\w32|4\.\w32|4\.\w64|2\.\w64)|cp\.async\.cg"
    r"|^LDG\.[\w.]*(?:128|256)|^LDGSTS\.[\w.]*128"
)
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@dataclass(frozen=True)
class Listing:
    """The instructions of a function, and its loops as ranges of them."""

    instructions: tuple[str, ...]
    loops: tuple[range, ...]

    @property
    def main_loop(self) -> tuple[str, ...]:
        """The innermost loop with most products on tensor cores, or else the longest one.

        It is empty if there is none. Behind the products, code that jumps back makes longer loops.
        """

        def rank(loop: range) -> tuple[int, int]:
            each = self.instructions[loop.start : loop.stop]
            products = sum(bool(PRODUCT.search(opcode(one))) for one in each)
            return products, -len(loop) if products else len(loop)

        main = max(self.loops, key=rank, default=range(0))
        return self.instructions[main.start : main.stop]

    @property
    def in_loops(self) -> tuple[str, ...]:
        """All instructions of loops."""
        numbers = sorted({number for loop in self.loops for number in loop})
        return tuple(self.instructions[number] for number in numbers)


def read_functions(text: str, sizes: Sequence[int]) -> list[Listing]:
    """Read what nvdisasm prints of functions, one behind another; `sizes` are their bytes."""
    functions, ends = list[Listing](), [*accumulate(sizes)]
    instructions, labels = list[str](), dict[str, int]()
    for match in SASS.finditer(text):
        at = int(match["at"], 16)
        if at >= ends[len(functions)]:
            functions.append(_listing(instructions, labels))
            instructions, labels = [], {}
        labels[f"0x{at:x}"] = len(instructions)
        instructions.append(match["text"].strip())
    functions.append(_listing(instructions, labels))
    assert len(functions) == len(sizes)
    return functions


def read_ptx(text: str) -> Listing:
    """Read the PTX of a function."""
    instructions, labels = list[str](), dict[str, int]()
    for line in text.splitlines():
        if match := LABEL.match(line):
            labels[match["label"]] = len(instructions)
        elif (stripped := line.strip()).endswith(";") and not stripped.startswith((".", "//")):
            instructions.append(stripped.rstrip(";"))
    return _listing(instructions, labels)


def _listing(instructions: list[str], labels: dict[str, int]) -> Listing:
    """Find the loops of a function, whose branches name one of the labels."""
    loops = list[range]()
    for number, instruction in enumerate(instructions):
        if match := BRANCH.search(instruction):
            target = labels.get(match["label"], number + 1)
            # A branch to itself ends a function; it is no loop.
            if target < number:
                loops.append(range(target, number + 1))
    return Listing(tuple(instructions), tuple(loops))


def opcode(instruction: str) -> str:
    """The operation and its modifiers, without predicate and operands."""
    return PREDICATE.sub("", instruction).split()[0]


def operation(instruction: str) -> str:
    """The operation alone, such as LDG."""
    return opcode(instruction).split(".")[0]


def count(instructions: tuple[str, ...], *operations: str) -> int:
    """The number of instructions with one of the operations."""
    return sum(operation(each) in operations for each in instructions)


def loaded_bytes(instructions: tuple[str, ...], *operations: str) -> Counter[int]:
    """Bytes that a lane loads with one of the operations, by the bytes of a load."""
    loaded = Counter[int]()
    for each in instructions:
        if operation(each) in operations:
            modifiers = opcode(each).split(".")[1:]
            width = next((WIDTHS[m] for m in modifiers if m in WIDTHS), 4)
            loaded[width] += width
    return loaded


def turns(sass: Listing, ptx: Listing) -> int:
    """Return how many iterations of the main loop in PTX are one turn of the loop in SASS.

    The assembler may unroll a loop. It never divides or joins what is counted here: products on
    tensor cores, and, in a loop without these, loads of 128 bits.
    """
    for kind in (PRODUCT, WIDE):
        once, here = (
            sum(bool(kind.search(opcode(each))) for each in of.main_loop) for of in (ptx, sass)
        )
        if once:
            assert here > 0, f"{kind.pattern} is in PTX alone"
            assert here % once == 0, f"{here} of {kind.pattern} in SASS, {once} in PTX"
            return here // once
    raise AssertionError("the loop has neither products on tensor cores nor wide loads")


def lane_instructions(loop: tuple[str, ...], weights: float) -> float:
    """Return the instructions that a lane executes for each weight.

    loop: the instructions of a turn of the loop
    weights: the weights that a lane multiplies in a turn
    """
    return sum(operation(each) != "NOP" for each in loop) / weights
