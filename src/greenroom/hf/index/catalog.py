"""Index a checkpoint: the catalog of where every expert's bytes lie and how they fill a slot.

For each experts module, transformers' own conversion is run on the numbers of one expert's elements
(blocks.py) and the strided blocks are read off its result; every other expert is the same blocks
at its own offsets (columns.py). Tensors that are neighbours in a file are read together, as one
extent (extents.py). Encoded matrices stay as they are stored. A pack's header says where its
experts lie: only the model's config must agree with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from transformers import PreTrainedModel

from greenroom.core.layout import PLAIN, Catalog, Copy, Extent, SlotLayout
from greenroom.errors import CheckpointError, UnsupportedModel, UsageError
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.checkpoint.pack.catalog import PackCatalog, catalog_of
from greenroom.hf.checkpoint.pack.format import HEADER, PackLayer
from greenroom.hf.checkpoint.pack.reading import Pack
from greenroom.hf.index.blocks import Block, derive_blocks
from greenroom.hf.index.columns import SourceTensor, mixed_types_error, source_tensors
from greenroom.hf.index.conversions import WeightConversion
from greenroom.hf.index.experts import StreamedParameter
from greenroom.hf.index.extents import copy_of, elements_of, extents_of
from greenroom.runtime.encodings import ENCODINGS


def make_catalog(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    conversions: dict[str, WeightConversion],
    layers: list[list[StreamedParameter]],
) -> Catalog:
    """The catalog of all streamed experts.

    `model` is on the meta device and still has its expert parameters. Raises CheckpointError where
    an expert's tensor is missing or of a wrong shape, UnsupportedModel where one is stored in a way
    that is not served.
    """
    if checkpoint.pack is not None:
        return _pack_catalog(checkpoint.pack, model, layers)
    indexer = _Indexer(model, checkpoint, conversions)
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
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        conversions: dict[str, WeightConversion],
    ) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.by_target = {
            target: conversion
            for conversion in conversions.values()
            for target in conversion.targets
        }
        self.derived: dict[Any, dict[str, list[Block]]] = {}

    def layer(
        self, layer: list[StreamedParameter], order: list[str]
    ) -> tuple[list[tuple[Extent, ...]], SlotLayout]:
        """The extents of each expert of one layer, and its slot's layout."""
        conversions = self._conversions(layer)
        experts = layer[0].shape[0]
        parts = [
            source_tensors(self.checkpoint, conversion, experts) for conversion in conversions
        ]  # [conversion][expert]
        self._check_equal(conversions, parts, layer)
        blocks = [
            self._blocks(conversion, mine[0], layer)
            for conversion, mine in zip(conversions, parts, strict=True)
        ]
        layout = _layout(layer, order, parts, blocks)
        plans = [  # one list of copies for each stored tensor of an expert, in its own bytes
            plan
            for mine, found in zip(parts, blocks, strict=True)
            for i, part in enumerate(mine[0])
            for plan in _copies(part.stored, i, found, layout)
        ]
        shared: dict[Any, tuple[Copy, ...]] = {}
        table = [
            extents_of(
                [s for mine in parts for p in mine[e] for s in p.stored.parts], plans, shared
            )
            for e in range(experts)
        ]
        return table, layout

    def _conversions(self, layer: list[StreamedParameter]) -> list[WeightConversion]:
        names = {streamed.full_name for streamed in layer}
        conversions: list[WeightConversion] = []
        for name in sorted(names):
            conversion = self.by_target.get(name)
            if conversion is None:
                raise CheckpointError(
                    f"{self.checkpoint.folder}: no tensor for {name}: the experts are missing"
                )
            shares = any(op.supports_many_to_many for op in conversion.operations)
            if shares or not names >= set(conversion.targets):
                raise UnsupportedModel(
                    f"{type(self.model).__name__}: experts that share tensors with other parameters"
                    " are not served yet"
                )
            if conversion not in conversions:
                conversions.append(conversion)
        return conversions

    def _check_equal(
        self,
        conversions: list[WeightConversion],
        parts: list[list[list[SourceTensor]]],
        layer: list[StreamedParameter],
    ) -> None:
        """Every expert's tensors must have the shapes (and types) that make its parameters."""
        for conversion, mine in zip(conversions, parts, strict=True):
            encoded = any(part.stored.encoding != PLAIN for part in mine[0])
            if encoded and len({part.kind for part in mine[0]}) > 1:
                raise mixed_types_error(
                    [[part] for part in mine[0]], conversion.targets[0], self.checkpoint.folder
                )
            if len({tuple((part.shape, part.kind) for part in own) for own in mine}) == 1:
                continue
            right = next((own for own in mine if self._fits(conversion, own, layer)), None)
            if right is None:
                continue
            for part, other in (pair for own in mine for pair in zip(own, right, strict=True)):
                if part.shape != other.shape:
                    raise CheckpointError(
                        f"{self.checkpoint.files[part.stored.file]}: {part.name} has shape"
                        f" {list(part.shape)}, but {list(other.shape)} is right"
                    )
            raise mixed_types_error(mine, conversion.targets[0], self.checkpoint.folder)

    def _fits(
        self, conversion: WeightConversion, own: list[SourceTensor], layer: list[StreamedParameter]
    ) -> bool:
        try:
            self._blocks(conversion, own, layer)
        except CheckpointError:
            return False
        return True

    def _blocks(
        self, conversion: WeightConversion, own: list[SourceTensor], layer: list[StreamedParameter]
    ) -> dict[str, list[Block]]:
        """For each target parameter's name the blocks that fill it from one expert's tensors."""
        wanted = {s.full_name: s for s in layer if s.full_name in conversion.targets}
        key = (
            id(conversion.converter),
            tuple((p.shape, p.stored.encoding != PLAIN, p.stored.transposed) for p in own),
            tuple((s.name, s.shape) for s in wanted.values()),
        )
        if key not in self.derived:
            self.derived[key] = derive_blocks(self.model, self.checkpoint, conversion, own, wanted)
        return self.derived[key]


def _copies(
    stored: StoredTensor, source: int, blocks: dict[str, list[Block]], layout: SlotLayout
) -> list[list[Copy]]:
    """The copies out of each stored tensor of a part, which is the number `source` of its route."""
    plans = []
    for i, tensor in enumerate(stored.parts):
        copies: list[Copy] = []
        for name, its in blocks.items():
            spec = layout.weight(name).parts[i]
            for block in (block for block in its if block.source == source):
                if stored.encoding != PLAIN:
                    unit = stored.codes[0] // tensor.shape[0]
                    block = elements_of(block, unit, tensor.shape[1])
                copies.append(copy_of(block, tensor.dtype, spec))
        plans.append(sorted(copies, key=lambda copy: copy.source))
    return plans


def _layout(
    layer: list[StreamedParameter],
    order: list[str],
    parts: list[list[list[SourceTensor]]],
    blocks: list[dict[str, list[Block]]],
) -> SlotLayout:
    """Tensors in the order in which the first expert's bytes lie on disk.

    Then an expert whose tensors are neighbours in the file is one run of bytes in the slot too.
    """
    wanted = {streamed.name: streamed for streamed in layer}
    place: dict[str, tuple[int, int]] = {}
    made: dict[str, tuple[tuple[int, ...], str]] = {}
    encodings: dict[str, str] = {}
    for mine, found in zip(parts, blocks, strict=True):
        for name, its in found.items():
            first, streamed = mine[0][its[0].source].stored, wanted[name]
            plain, kinds = first.encoding == PLAIN, [""]
            if not plain:
                encodings[name] = first.encoding
                kinds += ENCODINGS[first.encoding].companions
            outputs = sum(block.shape[0] * block.shape[1] for block in its)
            for kind, tensor in zip(kinds, first.parts, strict=True):
                key = f"{name}.{kind}".rstrip(".")
                place[key] = tensor.file, tensor.offset
                if plain:
                    made[key] = streamed.shape[1:], str(streamed.dtype)[6:]
                    continue
                rows = outputs * tensor.shape[0] // first.codes[0]
                dtype = "float32" if kind and first.encoding == "fp8" else tensor.dtype
                made[key] = (rows, tensor.shape[1]), dtype
    if set(order) != set(made):
        order = sorted(made, key=lambda name: place[name])
    dtype = str(layer[0].dtype)[6:]
    return SlotLayout.pack([(name, *made[name]) for name in order], encodings, dtype)


def _pack_catalog(
    pack: Pack, model: PreTrainedModel, layers: Sequence[list[StreamedParameter]]
) -> PackCatalog:
    """The catalog for a model, which is on the meta device; CheckpointError where the pack's
    experts are not those of its config."""
    names = [layer.name for layer in pack.header.layers]
    if names != [layer[0].module for layer in layers]:
        raise CheckpointError(f"{pack.folder / HEADER}: has other layers than the config says")
    for layer, streamed in zip(pack.header.layers, layers, strict=True):
        _check_packed(pack, model, layer, streamed)
    dtypes = [{each.name: str(each.dtype)[6:] for each in layer} for layer in layers]
    own = pack.header.dtype
    if pack.header.precision and any({*layer.values()} != {own} for layer in dtypes):
        raise UsageError(f"{pack.folder}: a pack with copies computes in {own}: leave out --dtype")
    return catalog_of(pack.header, pack.folder, dtypes)


def _check_packed(
    pack: Pack, model: PreTrainedModel, layer: PackLayer, streamed: list[StreamedParameter]
) -> None:
    transposed = model.get_submodule(layer.name).is_transposed
    for each in streamed:
        try:
            weight = layer.layout.weight(each.name)
        except StopIteration:
            raise CheckpointError(f"{pack.folder / HEADER}: {each.full_name} is missing") from None
        flip = transposed and weight.encoding != PLAIN
        shape = (layer.experts, *weight.shape[:: -1 if flip else 1])
        if shape != each.shape:
            raise CheckpointError(
                f"{pack.folder / HEADER}: {each.full_name} has shape {list(shape)}, but the"
                f" config says {list(each.shape)}"
            )
