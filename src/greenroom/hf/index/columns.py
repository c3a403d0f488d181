"""Find each expert's checkpoint tensors, and check that none is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import overload

from greenroom.core.layout import BLOCKS, FLOATS, PLAIN
from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.index.conversions import WeightConversion


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A checkpoint tensor of one expert, or the expert's slice of a fused tensor.

    name:    the tensor's name in the checkpoint
    pattern: transformers' source pattern that matches the name
    stored:  the file position, type and shape of this expert's part
    """

    name: str
    pattern: str
    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def kind(self) -> str:
        """The stored type of an expert's tensor: its dtype, or its encoding and scales' dtypes."""
        if self.stored.encoding == PLAIN:
            return self.stored.dtype
        scales = " and ".join(companion.dtype for companion in self.stored.companions)
        return self.stored.encoding + (f" with scales in {scales}" if scales else "")


class StackedTensors(Sequence[list[SourceTensor]]):
    """Slices of fused tensors, as [expert][tensor]; all experts have equal shapes and types.

    A slice is made when it is asked for: a model may have 10,000 experts.
    """

    def __init__(self, columns: Sequence[_Stack], experts: int) -> None:
        self._columns, self._experts = columns, experts

    def __len__(self) -> int:
        return self._experts

    @overload
    def __getitem__(self, expert: int) -> list[SourceTensor]: ...
    @overload
    def __getitem__(self, expert: slice) -> list[list[SourceTensor]]: ...
    def __getitem__(self, expert: int | slice) -> list[SourceTensor] | list[list[SourceTensor]]:
        numbers = range(self._experts)[expert]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        return [column[numbers] for column in self._columns]


@dataclass(frozen=True, slots=True)
class _Stack:
    """A fused tensor: one slice for each expert."""

    name: str
    pattern: str
    stored: StoredTensor

    def __getitem__(self, expert: int) -> SourceTensor:
        return SourceTensor(self.name, self.pattern, self.stored[expert])


def source_tensors(
    checkpoint: Checkpoint, conversion: WeightConversion, experts: int
) -> Sequence[list[SourceTensor]]:
    """Return the checkpoint tensors that a weight conversion needs, as [expert][tensor].

    These are `StackedTensors` if all of them are slices of fused tensors. The tensors of an expert
    are in the order of the conversion's source patterns. Raises CheckpointError if tensors are
    missing or do not fit the number of experts, UnsupportedModel if they are stored in a type that
    is not supported.
    """
    patterns = (
        conversion.converter.source_patterns if conversion.converter else list(conversion.sources)
    )
    columns: list[_Stack | list[SourceTensor]] = []
    for pattern in patterns:
        names = conversion.sources.get(pattern)
        if not names:
            raise CheckpointError(
                f"{checkpoint.folder}: tensors are missing: {conversion.targets[0]} is made from"
                f" tensors named like {pattern.replace(chr(92), '')}, but the checkpoint has none"
            )
        stacked = any(getattr(op, "stacked", False) for op in conversion.operations)
        columns.append(_column(checkpoint, pattern, names, experts, stacked))
    stacks = [column for column in columns if isinstance(column, _Stack)]
    if len(stacks) == len(columns):
        return StackedTensors(stacks, experts)
    return [[column[e] for column in columns] for e in range(experts)]


def _column(
    checkpoint: Checkpoint, pattern: str, names: list[str], experts: int, stacked: bool
) -> _Stack | list[SourceTensor]:
    """Return, for each expert, its tensor or its slice of a fused tensor.

    `stacked` means that the fused tensor has no expert axis: its rows are those of all experts, one
    after another.
    """
    stored = checkpoint.tensors
    for name in names:
        _check_served(checkpoint, name, stored[name])
    if "*" in pattern:
        _check_numbers(checkpoint.folder, names, experts)
        return [SourceTensor(name, pattern, stored[name]) for name in names]
    name, fused = names[0], stored[names[0]]
    if stacked and fused.shape[0] % experts == 0:
        fused = replace(fused, shape=(experts, fused.shape[0] // experts, *fused.shape[1:]))
    if len(names) != 1 or fused.shape[:1] != (experts,) or not fused.nbytes:
        raise CheckpointError(
            f"{checkpoint.files[fused.file]}: the tensor {name} has shape {list(fused.shape)},"
            f" which does not fit the {experts} experts of the config: download the model again"
        )
    return _Stack(name, pattern, fused)


def _check_served(checkpoint: Checkpoint, name: str, stored: StoredTensor) -> None:
    path = checkpoint.files[stored.file]
    if stored.encoding == PLAIN and stored.dtype not in FLOATS:
        raise UnsupportedModel(
            f"{path}: the tensor {name} of an expert has dtype {stored.dtype} without scales, but"
            f" experts must be in {', '.join(FLOATS)} or a supported quantisation"
        )
    if stored.encoding not in (PLAIN, *BLOCKS):
        raise UnsupportedModel(
            f"{path}: the tensor {name} is stored as {stored.encoding}, which is not supported for"
            f" experts; supported are {', '.join(BLOCKS)}"
        )
    rows = stored.codes[-2] if stored.codes else 0
    if rows % stored.unit:
        raise UnsupportedModel(
            f"{path}: the tensor {name} has {rows} outputs, which is not a multiple of"
            f" {stored.unit}, the number of outputs that share a scale"
        )


def mixed_types_error(
    parts: Sequence[list[SourceTensor]], target: str, folder: Path
) -> UnsupportedModel:
    """Return the error for experts of one layer that are stored in different types."""
    kinds = {tuple(part.kind for part in expert): expert for expert in parts}
    (a, first), (b, other) = list(kinds.items())[:2]
    at = next((i for i in range(len(a)) if a[i] != b[i]), 0)
    return UnsupportedModel(
        f"{folder}: the experts of {target} are stored in different types: {first[at].name} as"
        f" {a[at]}, {other[at].name} as {b[at]}"
    )


def _check_numbers(folder: Path, names: list[str], experts: int) -> None:
    """Check that there is one tensor name for each expert, numbered from 0."""
    split = [name.split(".") for name in names]
    columns = list(zip_longest(*split))
    number = next((i for i, column in enumerate(columns) if len(set(column)) > 1), None)
    if number is None:  # a single name: the last part that is a number is its expert's
        number = max((i for i, part in enumerate(split[0]) if part.isdigit()), default=0)
    present = {name[number] for name in split if number < len(name)}
    lead = split[0][number].rstrip("0123456789")  # empty, or as in `expert_7`
    expected = (f"{lead}{e}" for e in range(experts))  # lazy: `experts` may be a wrong huge number
    if lost := next((e for e in expected if e not in present), None):
        name = ".".join([*split[0][:number], lost, *split[0][number + 1 :]])
        raise CheckpointError(
            f"{folder}: the tensor {name} is missing, though the config says that a layer has"
            f" {experts} experts: download the model again"
        )
    if len(names) != experts:
        raise CheckpointError(
            f"{folder}: the checkpoint has {len(names)} tensors named like {names[-1]}, but the"
            f" config says that a layer has {experts} experts: download the model again"
        )
