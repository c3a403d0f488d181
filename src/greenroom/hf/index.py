"""Index a checkpoint: the catalog of where every expert's bytes lie and how they fill a slot.

For each experts module, transformers' own conversion is run on the numbers of one expert's elements
and the strided blocks are read off its result; every other expert is the same blocks at its own
offsets. Source tensors that are neighbours in a file are read together, as one extent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from greenroom.core.layout import ITEMSIZE, Catalog, Copy, Extent, SlotLayout
from greenroom.errors import CheckpointError, UnsupportedModel
from greenroom.hf.blocks import Block, find_blocks
from greenroom.hf.checkpoint import Checkpoint
from greenroom.hf.experts import Streamed
from greenroom.hf.header import Stored
from greenroom.hf.routes import Route

GAP = 4096  # bytes; tensors at most this far apart are read in one go


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor, or one expert's slice of a fused one, that feeds one expert."""

    name: str
    pattern: str
    file: int
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


def make_catalog(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    routes: dict[str, Route],
    layers: list[list[Streamed]],
) -> Catalog:
    """The catalog of all streamed experts.

    `model` is on the meta device and still has its expert parameters. Raises CheckpointError where
    an expert's tensor is missing or of a wrong shape, UnsupportedModel where one is quantised.
    """
    indexer = _Indexer(model, checkpoint, routes)
    tables, layouts = [], []
    order: list[str] = []
    for layer in layers:
        table, layout = indexer.layer(layer, order)
        order = order or [spec.name for spec in layout.tensors]
        tables.append(table)
        layouts.append(layout)
    counts = [layer[0].shape[0] for layer in layers]
    return Catalog(
        files=checkpoint.files,
        layers=tuple(layer[0].module for layer in layers),
        offsets=(0, *accumulate(counts)),
        layouts=tuple(layouts),
        locate=lambda layer, expert: tables[layer][expert],
    )


class _Indexer:
    """What the layers of a checkpoint share: the conversions that were read off already."""

    def __init__(
        self, model: PreTrainedModel, checkpoint: Checkpoint, routes: dict[str, Route]
    ) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.by_target = {target: route for route in routes.values() for target in route.targets}
        self.known: dict[Any, dict[str, list[Block]]] = {}

    def layer(
        self, layer: list[Streamed], order: list[str]
    ) -> tuple[list[tuple[Extent, ...]], SlotLayout]:
        """The extents of each expert of one layer, and its slot's layout."""
        routes = self._routes(layer)
        experts = layer[0].shape[0]
        parts = [self._parts(route, experts) for route in routes]  # [route][expert][tensor]
        self._check_equal(routes, parts, layer)
        blocks = [
            self._blocks(route, mine[0], layer) for route, mine in zip(routes, parts, strict=True)
        ]
        layout = self._layout(layer, order, parts, blocks)
        plans = [  # one list of copies for each part of an expert, in the part's own bytes
            _part_copies(part.dtype, i, found, layout)
            for mine, found in zip(parts, blocks, strict=True)
            for i, part in enumerate(mine[0])
        ]
        shared: dict[Any, tuple[Copy, ...]] = {}
        table = [
            _extents([part for mine in parts for part in mine[e]], plans, shared)
            for e in range(experts)
        ]
        return table, layout

    def _routes(self, layer: list[Streamed]) -> list[Route]:
        names = {streamed.full_name for streamed in layer}
        routes: list[Route] = []
        for name in sorted(names):
            route = self.by_target.get(name)
            if route is None:
                raise CheckpointError(
                    f"{self.checkpoint.folder}: no tensor for {name}: the experts are missing"
                )
            ops = route.converter.operations if route.converter else []
            if any(op.supports_many_to_many for op in ops) or not names >= set(route.targets):
                raise UnsupportedModel(
                    f"{type(self.model).__name__}: experts that share tensors with other parameters"
                    " are not served yet"
                )
            if route not in routes:
                routes.append(route)
        return routes

    def _parts(self, route: Route, experts: int) -> list[list[Part]]:
        """The tensors of each expert, patterns in the converter's order."""
        patterns = route.converter.source_patterns if route.converter else list(route.sources)
        columns = []
        for pattern in patterns:
            names = route.sources.get(pattern)
            if not names:
                raise CheckpointError(
                    f"{self.checkpoint.folder}: {route.targets[0]} needs tensors named like"
                    f" {pattern.replace(chr(92), '')}, and there are none"
                )
            columns.append(self._column(pattern, names, experts))
        return [list(parts) for parts in zip(*columns, strict=True)]

    def _column(self, pattern: str, names: list[str], experts: int) -> list[Part]:
        """One tensor, or slice of a fused tensor, for each expert."""
        stored = self.checkpoint.tensors
        for name in names:
            if stored[name].dtype not in ITEMSIZE:
                raise UnsupportedModel(
                    f"{self._file(stored[name])}: {name} is stored as {stored[name].dtype}:"
                    " quantised experts are not served yet"
                )
        if "*" in pattern:
            _check_numbers(self.checkpoint.folder, names, experts)
            return [
                Part(n, pattern, (s := stored[n]).file, s.offset, s.dtype, s.shape) for n in names
            ]
        name, fused = names[0], stored[names[0]]
        if len(names) != 1 or fused.shape[:1] != (experts,):
            raise CheckpointError(
                f"{self._file(fused)}: {name} has shape {list(fused.shape)}, but the config says"
                f" {experts} experts"
            )
        size = fused.nbytes // experts
        return [
            Part(name, pattern, fused.file, fused.offset + e * size, fused.dtype, fused.shape[1:])
            for e in range(experts)
        ]

    def _check_equal(
        self, routes: list[Route], parts: list[list[list[Part]]], layer: list[Streamed]
    ) -> None:
        """Every expert's tensors must have the shapes (and dtypes) that make its parameters."""
        for route, mine in zip(routes, parts, strict=True):
            signatures = {tuple((p.shape, p.dtype) for p in own) for own in mine}
            if len(signatures) == 1:
                continue
            shapes = {tuple(p.shape for p in own) for own in mine}
            right = [s for s in shapes if self._fits(route, mine[0], s, layer)]
            for own in mine:
                for i, part in enumerate(own):
                    if right and part.shape != right[0][i]:
                        raise CheckpointError(
                            f"{self.checkpoint.files[part.file]}: {part.name} has shape"
                            f" {list(part.shape)}, but {list(right[0][i])} is right"
                        )
            if right:
                raise UnsupportedModel(
                    f"{self.checkpoint.folder}: the experts of {route.targets[0]} are stored in"
                    " different dtypes"
                )

    def _fits(
        self,
        route: Route,
        own: list[Part],
        shapes: tuple[tuple[int, ...], ...],
        layer: list[Streamed],
    ) -> bool:
        resized = [
            Part(p.name, p.pattern, p.file, p.offset, p.dtype, shape)
            for p, shape in zip(own, shapes, strict=True)
        ]
        try:
            self._blocks(route, resized, layer)
        except CheckpointError:
            return False
        return True

    def _blocks(
        self, route: Route, own: list[Part], layer: list[Streamed]
    ) -> dict[str, list[Block]]:
        """For each target parameter's name the blocks that fill it from one expert's tensors."""
        wanted = {s.full_name: s for s in layer if s.full_name in route.targets}
        key = (
            id(route.converter),
            tuple(p.shape for p in own),
            tuple((s.name, s.shape) for s in wanted.values()),
        )
        if key not in self.known:
            self.known[key] = self._read_off(route, own, wanted)
        return self.known[key]

    def _read_off(
        self, route: Route, own: list[Part], wanted: dict[str, Streamed]
    ) -> dict[str, list[Block]]:
        sizes = [prod(part.shape) for part in own]
        made = _convert(self.model, route, own, sizes)
        found = {}
        for full_name, streamed in wanted.items():
            numbers = made.get(full_name)
            shape = (1, *streamed.shape[1:])
            if numbers is None or tuple(numbers.shape) != shape:
                got = "another arrangement" if numbers is None else list(numbers.shape[1:])
                having = ", ".join(f"{part.name} {list(part.shape)}" for part in own)
                raise CheckpointError(
                    f"{self.checkpoint.files[own[0].file]}: {having} make {got} an expert, but"
                    f" {full_name} has shape {list(shape[1:])}"
                )
            blocks = find_blocks(numbers.reshape(-1).numpy(), sizes)
            if blocks is None:
                raise UnsupportedModel(
                    f"{type(self.model).__name__}: the conversion of {full_name} is too irregular"
                )
            found[streamed.name] = blocks
        return found

    def _layout(
        self,
        layer: list[Streamed],
        order: list[str],
        parts: list[list[list[Part]]],
        blocks: list[dict[str, list[Block]]],
    ) -> SlotLayout:
        """Tensors in the order in which the first expert's bytes lie on disk.

        Then an expert whose tensors are neighbours in the file is one run of bytes in the slot too.
        """
        place = {}
        for mine, found in zip(parts, blocks, strict=True):
            for name, its in found.items():
                first = mine[0][its[0].source]
                place[name] = (first.file, first.offset)
        names = {streamed.name: streamed for streamed in layer}
        if set(order) != set(names):
            order = sorted(names, key=lambda name: place[name])
        return SlotLayout.pack(
            [(name, names[name].shape[1:], str(names[name].dtype)[6:]) for name in order]
        )

    def _file(self, stored: Stored) -> str:
        return self.checkpoint.files[stored.file]


class _OneExpert:
    """A model as conversions see it (they ask for parameters' shapes), with a single expert."""

    def __init__(self, model: PreTrainedModel, targets: Sequence[str]) -> None:
        self._model, self._targets = model, targets

    def get_parameter(self, name: str) -> torch.Tensor:
        parameter: torch.Tensor = self._model.get_parameter(name)
        return parameter[:1] if name in self._targets else parameter


def _convert(
    model: PreTrainedModel, route: Route, own: list[Part], sizes: list[int]
) -> dict[str, torch.Tensor]:
    """Run the route's conversion on the numbers of one expert's elements; [1, ...] a target."""
    dtype = torch.int32 if sum(sizes) < 2**31 else torch.int64
    starts = accumulate(sizes, initial=0)
    if route.converter is None:
        return {route.targets[0]: torch.arange(sizes[0], dtype=dtype).reshape(1, *own[0].shape)}
    converter = deepcopy(route.converter)
    for part, start, size in zip(own, starts, sizes, strict=False):
        numbers = torch.arange(start, start + size, dtype=dtype).reshape(part.shape)
        if "*" not in part.pattern:
            numbers = numbers[None]
        converter.add_tensor(route.targets[0], part.name, part.pattern, numbers)
    try:
        made = converter.convert(
            route.targets[0], model=_OneExpert(model, route.targets), config=model.config
        )
    except (RuntimeError, ValueError, IndexError):  # shapes that do not go together
        return {}
    return {name: v[0] if isinstance(v, list) else v for name, v in made.items()}


def _check_numbers(folder: Path, names: list[str], experts: int) -> None:
    """The names must be those of experts 0 .. experts-1, one each."""
    split = [name.split(".") for name in names]
    columns = list(zip_longest(*split))
    number = next((i for i, column in enumerate(columns) if len(set(column)) > 1), None)
    if number is None:  # a single name: its expert's number is the last one before the end
        number = max((i for i, word in enumerate(split[0]) if word.isdigit()), default=0)
    found = {words[number] for words in split if number < len(words)}
    wanted = [str(e) for e in range(experts)]
    if lost := next((e for e in wanted if e not in found), None):
        name = ".".join([*split[0][:number], lost, *split[0][number + 1 :]])
        raise CheckpointError(f"{folder}: {name} is missing: the config says {experts} experts")
    if len(names) != experts:
        raise CheckpointError(
            f"{folder}: {len(names)} tensors like {names[-1]}, but the config says"
            f" {experts} experts"
        )


def _part_copies(
    dtype: str, source: int, blocks: dict[str, list[Block]], layout: SlotLayout
) -> list[Copy]:
    """The copies out of one source tensor; `source` is its number among its route's tensors."""
    copies = []
    for name, its in blocks.items():
        spec = layout[name]
        a, b = ITEMSIZE[dtype], ITEMSIZE[spec.dtype]
        copies += [
            Copy(
                source=block.source_start * a,
                target=spec.offset + block.target_start * b,
                shape=block.shape,
                source_strides=(block.source_strides[0] * a, block.source_strides[1] * a),
                target_strides=(block.target_strides[0] * b, block.target_strides[1] * b),
                source_dtype=dtype,
                target_dtype=spec.dtype,
            )
            for block in its
            if block.source == source
        ]
    return sorted(copies, key=lambda copy: copy.source)


def _extents(
    own: list[Part], plans: list[list[Copy]], shared: dict[Any, tuple[Copy, ...]]
) -> tuple[Extent, ...]:
    """Group one expert's tensors into extents; experts arranged alike share their copies."""
    order = sorted(range(len(own)), key=lambda i: (own[i].file, own[i].offset))
    groups: list[list[int]] = []
    end = (-1, 0)
    for i in order:
        part = own[i]
        if part.file == end[0] and part.offset - end[1] <= GAP:
            groups[-1].append(i)
        else:
            groups.append([i])
        end = (part.file, part.offset + part.nbytes)
    extents = []
    for group in groups:
        first, last = own[group[0]], own[group[-1]]
        inside = tuple((i, own[i].offset - first.offset) for i in group)
        if inside not in shared:
            shared[inside] = _place(inside, plans)
        length = last.offset + last.nbytes - first.offset
        extents.append(Extent(first.file, first.offset, length, shared[inside]))
    return tuple(extents)


def _place(inside: Iterable[tuple[int, int]], plans: list[list[Copy]]) -> tuple[Copy, ...]:
    """The copies of an extent: each tensor's at its place, joined where they are one run."""
    placed: list[Copy] = []
    for i, at in inside:
        for copy in plans[i]:
            moved = _moved(copy, at)
            if placed and _adjacent(placed[-1], moved):
                moved = _joined(placed.pop(), moved)
            placed.append(moved)
    return tuple(placed)


def _moved(copy: Copy, by: int) -> Copy:
    return Copy(
        copy.source + by,
        copy.target,
        copy.shape,
        copy.source_strides,
        copy.target_strides,
        copy.source_dtype,
        copy.target_dtype,
    )


def _adjacent(a: Copy, b: Copy) -> bool:
    return (
        a.contiguous
        and b.contiguous
        and a.source_dtype == b.source_dtype
        and a.source + a.nbytes == b.source
        and a.target + a.nbytes == b.target
    )


def _joined(a: Copy, b: Copy) -> Copy:
    n = a.shape[0] * a.shape[1] + b.shape[0] * b.shape[1]
    size = ITEMSIZE[a.source_dtype]
    strides = (n * size, size)
    return Copy(a.source, a.target, (1, n), strides, strides, a.source_dtype, a.target_dtype)
