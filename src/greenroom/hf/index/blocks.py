"""Derive the strided blocks that a weight conversion moves, by running it on element numbers.

A chain of transformers' weight conversions (merge, concatenate, chunk, transpose, interleave) only
moves rows and columns. This module runs the chain on matrices whose elements are consecutive
numbers, so the result shows where each element came from. Two-dimensional strided blocks are then
found in these numbers. Rows of a quantised matrix must stay complete: a conversion may move its
rows (outputs), but not its columns (inputs).
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

MOST = 1 << 10  # blocks; a conversion that needs more is an arbitrary permutation


@dataclass(frozen=True, slots=True)
class Block:
    """A two-dimensional strided block of elements that a weight conversion moves.

    Element (i, j) of the block moves from element `source_start + i * source_strides[0] + j *
    source_strides[1]` of checkpoint tensor number `source` to element `target_start + i *
    target_strides[0] + j * target_strides[1]` of the parameter.
    """

    source: int
    source_start: int
    target_start: int
    shape: tuple[int, int]
    source_strides: tuple[int, int]
    target_strides: tuple[int, int]


def find_blocks(origin: np.ndarray, sizes: Sequence[int]) -> list[Block] | None:
    """Find the strided blocks that a weight conversion moves.

    `origin[i, j]` is the number of the source element that becomes element (i, j) of the parameter.
    The source tensors have `sizes` elements, which are numbered consecutively. Returns None if the
    parameter is empty, or cannot be divided into at most 1024 evenly spaced blocks.
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


def _runs(numbers: np.ndarray, ends: np.ndarray) -> list[slice]:
    """Divide a row or column of element numbers into evenly spaced runs of one tensor.

    The result is a single run, two interleaved runs, or consecutive runs.
    """
    source = np.searchsorted(ends, numbers, side="right")

    def run(start: int, step: int) -> slice:
        """Return the longest run of evenly spaced numbers from `start` on."""
        values, tensor = numbers[start::step], source[start::step]
        evenly = values[0] + (values[:2][-1] - values[0]) * np.arange(len(values))
        same = (values == evenly) & (tensor == tensor[0])
        count = len(values) if same.all() else int(same.argmin())
        return slice(start, start + (count - 1) * step + 1, step)

    for step in (1, 2):
        runs = [run(start, step) for start in range(min(step, len(numbers)))]
        if all(each.stop + step > len(numbers) for each in runs):
            return runs
    runs, start = [], 0
    while start < len(numbers) and len(runs) <= MOST:
        runs.append(run(start, 1))
        start = runs[-1].stop
    return runs


def _block(origin: np.ndarray, down: slice, across: slice, ends: np.ndarray) -> Block | None:
    """Return the block at some rows and columns; None if its elements are not evenly spaced."""
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
    sources: list[SourceTensor],
    targets: dict[str, StreamedParameter],
) -> dict[str, list[Block]]:
    """Derive the strided blocks that make one expert's parameters from its checkpoint tensors.

    sources: the expert's checkpoint tensors, to which `conversion` applies
    targets: the parameters of all experts, by full name

    Returns the blocks by parameter name. Their positions and sizes are in elements, or in rows if
    the tensors are quantised.
    Raises CheckpointError if the tensors' shapes do not fit the parameters, UnsupportedModel if the
    conversion moves elements too irregularly.
    """
    converted = _convert(model, conversion, sources)
    blocks_of = {}
    for full_name, streamed in targets.items():
        numbers = converted.get(full_name)
        shape = (1, *streamed.shape[1:])
        if numbers is None or tuple(numbers.shape) != shape:
            got = "" if numbers is None else f", not {list(numbers.shape[1:])}"
            having = ", ".join(f"{part.name} {list(part.shape)}" for part in sources)
            raise CheckpointError(
                f"{checkpoint.files[sources[0].stored.file]}: the shapes of one expert's tensors"
                f" ({having}) do not fit the config, by which an expert of {full_name} has shape"
                f" {list(shape[1:])}{got}: download the model again"
            )
        sizes = [prod(part.shape) for part in sources]
        matrix: Tensor | None = numbers[0]
        if sources[0].stored.encoding != PLAIN:
            module = model.get_submodule(streamed.module)
            matrix, sizes = _rows(numbers[0].T if module.is_transposed else numbers[0], sizes)
        blocks = find_blocks(matrix.numpy(), sizes) if matrix is not None else None
        if blocks is None:
            raise UnsupportedModel(
                f"{type(model).__name__}: this architecture is not supported: transformers"
                f" rearranges the weights of {full_name} too irregularly to read single experts"
            )
        blocks_of[streamed.name] = blocks
    return blocks_of


def _rows(matrix: Tensor, sizes: list[int]) -> tuple[Tensor | None, list[int]]:
    """Convert element numbers of a matrix to row numbers.

    Returns (the source row of each row [1, rows], the number of rows of each source tensor); the
    first is None if a conversion divided a row.
    """
    columns = matrix.shape[1]
    first = matrix[:, :1]
    complete = torch.equal(matrix, first + torch.arange(columns, dtype=matrix.dtype))
    if not complete or any(size % columns for size in sizes) or (first % columns).any():
        return None, sizes
    return (first // columns).T, [size // columns for size in sizes]


class _OneExpert:
    """View of a model with a single expert, for conversions that look up parameter shapes."""

    def __init__(self, model: PreTrainedModel, targets: Sequence[str]) -> None:
        self._model, self._targets = model, targets

    def get_parameter(self, name: str) -> Tensor:
        parameter: Tensor = self._model.get_parameter(name)
        return parameter[:1] if name in self._targets else parameter


def _convert(
    model: PreTrainedModel, conversion: WeightConversion, sources: list[SourceTensor]
) -> dict[str, Tensor]:
    """Run a weight conversion on the element numbers of one expert's tensors.

    Returns the parameters by name, each [1, ...]; nothing if the shapes do not fit together.
    """
    sizes = [prod(part.shape) for part in sources]
    dtype = torch.int32 if sum(sizes) < 2**31 else torch.int64
    numbered = [
        _numbers(part, start, dtype)
        for part, start in zip(sources, accumulate(sizes, initial=0), strict=False)
    ]
    tensors = {
        part.name: numbers if "*" in part.pattern else numbers[None]
        for part, numbers in zip(sources, numbered, strict=True)
    }
    try:
        return conversion.convert(tensors, _OneExpert(model, conversion.targets), model.config)
    except (RuntimeError, ValueError, IndexError):  # shapes that do not fit together
        return {}


def _numbers(part: SourceTensor, start: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of element numbers from `start` on, in the order of the stored elements."""
    numbers = torch.arange(start, start + prod(part.shape), dtype=dtype)
    if part.stored.transposed:
        return numbers.reshape(part.shape[::-1]).T
    return numbers.reshape(part.shape)
