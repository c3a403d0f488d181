"""What a conversion does to one expert's tensors, found by running it on the elements' numbers.

The numbers that come out say where each element of a parameter comes from. Of an encoded matrix
whole rows must stay together: its outputs may be moved, its inputs may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from greenroom.core.layout import PLAIN
from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.index.blocks import Block, find_blocks
from greenroom.hf.index.columns import Part
from greenroom.hf.index.experts import Streamed
from greenroom.hf.index.routes import Route


def read_off(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    route: Route,
    own: list[Part],
    wanted: dict[str, Streamed],
) -> dict[str, list[Block]]:
    """For each target parameter's name the blocks that fill it from one expert's tensors.

    Blocks count elements, and rows where the parts are encoded. CheckpointError where the shapes do
    not make the parameters; UnsupportedModel where there is no short description.
    """
    made = _convert(model, route, own)
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


def _convert(model: PreTrainedModel, route: Route, own: list[Part]) -> dict[str, Tensor]:
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
        return route.convert(given, _OneExpert(model, route.targets), model.config)
    except (RuntimeError, ValueError, IndexError):  # shapes that do not go together
        return {}


def _numbers(part: Part, start: int, dtype: torch.dtype) -> Tensor:
    """Numbers from `start` on, in the order in which the elements are stored."""
    numbers = torch.arange(start, start + prod(part.shape), dtype=dtype)
    if part.stored.transposed:
        return numbers.reshape(part.shape[::-1]).T
    return numbers.reshape(part.shape)
