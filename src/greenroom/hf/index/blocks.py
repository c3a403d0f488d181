"""Read a layout conversion off its result: which strided blocks move where.

A chain of conversions (merge, concatenate, chunk, transpose, interleave) only moves rows and
columns. Run on matrices that hold the elements' own numbers, its result says where each element
came from; this module finds the two-dimensional strided blocks in these numbers. Of an encoded
matrix whole rows must stay together: its outputs may be moved, its inputs may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from greenroom.core.layout import PLAIN
from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.index.columns import SourceTensor
from greenroom.hf.index.conversions import WeightConversion
from greenroom.hf.index.experts import StreamedParameter

MOST = 1 << 10  # blocks; a layout that needs more is not a layout but a permutation


@dataclass(frozen=True, slots=True)
class Block:
    """Elements (i, j) of source tensor `source` and where they go; all figures in elements."""

    source: int
    source_start: int
    target_start: int
    shape: tuple[int, int]
    source_strides: tuple[int, int]
    target_strides: tuple[int, int]


def find_blocks(origin: np.ndarray, sizes: Sequence[int]) -> list[Block] | None:
    """The blocks of a conversion, or None where there is no short description.

    `origin[i, j]` is the number of the source element that lands at target element (i, j); source
    tensors are numbered one after another and have `sizes` elements.
    """
    if not origin.size:
        return None
    ends = np.cumsum(np.asarray(sizes, np.int64))
    rows, columns = _runs(origin[:, 0], ends), _runs(origin[0], ends)
    if len(rows) * len(columns) > MOST:
        return None
    blocks = []
    for down, across in product(rows, columns):
        block = _block(origin, down, across, ends)
        if block is None:
            return None
        blocks.append(block)
    return blocks


def _runs(line: np.ndarray, ends: np.ndarray) -> list[slice]:
    """Cut a row or a column into runs of one tensor whose numbers are evenly spaced: all of it,
    every second element, or one run after another."""
    source = np.searchsorted(ends, line, side="right")

    def run(start: int, step: int) -> slice:
        """The longest run that starts here."""
        values, tensor = line[start::step], source[start::step]
        evenly = values[0] + (values[:2][-1] - values[0]) * np.arange(len(values))
        same = (values == evenly) & (tensor == tensor[0])
        count = len(values) if same.all() else int(same.argmin())
        return slice(start, start + (count - 1) * step + 1, step)

    for step in (1, 2):
        runs = [run(start, step) for start in range(min(step, len(line)))]
        if all(found.stop + step > len(line) for found in runs):
            return runs
    runs, start = [], 0
    while start < len(line) and len(runs) <= MOST:
        runs.append(run(start, 1))
        start = runs[-1].stop
    return runs


def _block(origin: np.ndarray, down: slice, across: slice, ends: np.ndarray) -> Block | None:
    """The block of some rows and columns; None where it is not one."""
    values = origin[down, across]
    (rows, columns), width = values.shape, origin.shape[1]
    first, last = values[0, 0], values[[0, 0, -1, -1], [0, -1, 0, -1]]
    steps = values[:2, 0][-1] - first, values[0, :2][-1] - first
    if any((np.diff(values, axis=axis) != step).any() for axis, step in enumerate(steps)):
        return None
    source, *others = np.searchsorted(ends, last, side="right").tolist()
    if any(other != source for other in others):
        return None
    outer, inner = (int(steps[0]), down.step * width), (int(steps[1]), across.step)
    if columns == 1:
        inner = outer if rows > 1 else (1, 1)
    n = rows * columns
    if rows == 1 or outer == (inner[0] * columns, inner[1] * columns):
        rows, columns, outer = 1, n, (inner[0] * n, inner[1] * n)
    return Block(
        source=source,
        source_start=int(first) - int(ends[source - 1] if source else 0),
        target_start=down.start * width + across.start,
        shape=(rows, columns),
        source_strides=(outer[0], inner[0]),
        target_strides=(outer[1], inner[1]),
    )


def derive_blocks(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    conversion: WeightConversion,
    own: list[SourceTensor],
    wanted: dict[str, StreamedParameter],
) -> dict[str, list[Block]]:
    """For each target parameter's name the blocks that fill it from one expert's tensors.

    Blocks count elements, and rows where the parts are encoded. CheckpointError where the shapes do
    not make the parameters; UnsupportedModel where there is no short description.
    """
    made = _convert(model, conversion, own)
    found = {}
    for full_name, streamed in wanted.items():
        numbers = made.get(full_name)
        shape = (1, *streamed.shape[1:])
        if numbers is None or tuple(numbers.shape) != shape:
            got = "another arrangement" if numbers is None else list(numbers.shape[1:])
            having = ", ".join(f"{part.name} {list(part.shape)}" for part in own)
            raise CheckpointError(
                f"{checkpoint.files[own[0].stored.file]}: {having} make {got} an expert, but"
                f" {full_name} has shape {list(shape[1:])}"
            )
        sizes = [prod(part.shape) for part in own]
        matrix: Tensor | None = numbers[0]
        if own[0].stored.encoding != PLAIN:
            module = model.get_submodule(streamed.module)
            matrix, sizes = _rows(numbers[0].T if module.is_transposed else numbers[0], sizes)
        blocks = find_blocks(matrix.numpy(), sizes) if matrix is not None else None
        if blocks is None:
            raise UnsupportedModel(
                f"{type(model).__name__}: the conversion of {full_name} is too irregular"
            )
        found[streamed.name] = blocks
    return found


def _rows(matrix: Tensor, sizes: list[int]) -> tuple[Tensor | None, list[int]]:
    """(sources of the rows [1, rows], rows of each part); None where a row was taken apart."""
    columns = matrix.shape[1]
    first = matrix[:, :1]
    whole = torch.equal(matrix, first + torch.arange(columns, dtype=matrix.dtype))
    if not whole or any(size % columns for size in sizes) or (first % columns).any():
        return None, sizes
    return (first // columns).T, [size // columns for size in sizes]


class _OneExpert:
    """A model as conversions see it (they ask for parameters' shapes), with a single expert."""

    def __init__(self, model: PreTrainedModel, targets: Sequence[str]) -> None:
        self._model, self._targets = model, targets

    def get_parameter(self, name: str) -> Tensor:
        parameter: Tensor = self._model.get_parameter(name)
        return parameter[:1] if name in self._targets else parameter


def _convert(
    model: PreTrainedModel, conversion: WeightConversion, own: list[SourceTensor]
) -> dict[str, Tensor]:
    """Run the route's conversion on the numbers of one expert's elements; [1, ...] a target."""
    sizes = [prod(part.shape) for part in own]
    dtype = torch.int32 if sum(sizes) < 2**31 else torch.int64
    numbered = [
        _numbers(part, start, dtype)
        for part, start in zip(own, accumulate(sizes, initial=0), strict=False)
    ]
    given = {
        part.name: numbers if "*" in part.pattern else numbers[None]
        for part, numbers in zip(own, numbered, strict=True)
    }
    try:
        return conversion.convert(given, _OneExpert(model, conversion.targets), model.config)
    except (RuntimeError, ValueError, IndexError):  # shapes that do not go together
        return {}


def _numbers(part: SourceTensor, start: int, dtype: torch.dtype) -> Tensor:
    """Numbers from `start` on, in the order in which the elements are stored."""
    numbers = torch.arange(start, start + prod(part.shape), dtype=dtype)
    if part.stored.transposed:
        return numbers.reshape(part.shape[::-1]).T
    return numbers.reshape(part.shape)
