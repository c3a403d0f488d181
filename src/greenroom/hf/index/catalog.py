"""Make the catalog of a checkpoint: each expert's byte ranges, and its layout in memory.

For each experts module, transformers' own weight conversion is run on the element numbers of one
expert, and the result shows which strided blocks of elements go where (blocks.py); other experts
have the same blocks at other offsets (columns.py). Tensors that are adjacent in a file are read
together, as one byte range (extents.py). Quantised matrices stay quantised in memory. The catalog
of a pack, a model in Greenroom's own format, comes from the pack's header, which is checked against
the model's config.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from transformers import PreTrainedModel

from greenroom.core.layout import MIXED, PLAIN, SECOND, Catalog, Copy, Extent, SlotLayout
from greenroom.errors import CheckpointError, UnsupportedModel, UsageError
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.header import StoredTensor
from greenroom.hf.checkpoint.pack.catalog import PackCatalog, catalog_of
from greenroom.hf.checkpoint.pack.format import HEADER, PackLayer
from greenroom.hf.checkpoint.pack.reading import Pack
from greenroom.hf.index.blocks import Block, derive_blocks
from greenroom.hf.index.columns import (
    SourceTensor,
    StackedTensors,
    mixed_types_error,
    source_tensors,
)
from greenroom.hf.index.conversions import WeightConversion
from greenroom.hf.index.experts import StreamedParameter
from greenroom.hf.index.extents import arranged_copy, between, copy_of, elements_of, extents_of
from greenroom.runtime.encodings import ENCODINGS


def make_catalog(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    conversions: dict[str, WeightConversion],
    layers: list[list[StreamedParameter]],
    order: Sequence[str] = (),
) -> Catalog:
    """Make the catalog of a checkpoint's experts: where each lies on disk and in memory.

    model:       the model on the meta device, still with its expert parameters
    conversions: transformers' weight conversions, by target parameter
    layers:      the expert parameters of each layer, which stay on disk
    order:       the preferred order of an expert's tensors in memory; empty: as in the first layer

    Raises CheckpointError if a tensor of an expert is missing or has a wrong shape,
    UnsupportedModel if the experts are stored in a form that is not supported, UsageError if a pack
    with low-precision copies or segments is to compute in another dtype than its own.
    """
    if checkpoint.pack is not None:
        return _pack_catalog(checkpoint.pack, model, layers)
    indexer = _Indexer(model, checkpoint, conversions)
    tables, layouts = [], []
    for layer in layers:
        table, layout = indexer.layer(layer, list(order))
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
    """Finder of the byte ranges of each layer's experts in a checkpoint.

    Layers whose tensors have equal shapes share one analysis of the weight conversion.
    """

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
        self.block_cache: dict[Any, dict[str, list[Block]]] = {}

    def layer(
        self, layer: list[StreamedParameter], order: list[str]
    ) -> tuple[list[tuple[Extent, ...]], SlotLayout]:
        """Return the byte ranges of each expert of a layer, and an expert's layout in memory.

        `order` is the preferred order of the tensors in memory.
        """
        conversions = self._conversions(layer)
        experts = layer[0].shape[0]
        parts = [
            source_tensors(self.checkpoint, conversion, experts) for conversion in conversions
        ]  # [conversion][expert]
        self._check_equal(conversions, parts, layer)
        blocks = [
            self._split_mixed(self._blocks(conversion, by_expert[0], layer), by_expert[0])
            for conversion, by_expert in zip(conversions, parts, strict=True)
        ]
        layout = _layout(layer, order, parts, blocks)
        plans = [  # one list of copies for each stored tensor of an expert, in that tensor's bytes
            plan
            for by_expert, blocks_of in zip(parts, blocks, strict=True)
            for i, part in enumerate(by_expert[0])
            for plan in _copies(part.stored, i, blocks_of, layout)
        ]
        shared: dict[Any, tuple[Copy, ...]] = {}

        def extents(e: int) -> tuple[Extent, ...]:
            tensors = [s for by_expert in parts for p in by_expert[e] for s in p.stored.parts]
            return extents_of(tensors, plans, shared)

        table = None
        if all(isinstance(by_expert, StackedTensors) for by_expert in parts):
            table = between(extents(0), extents(experts - 1), experts)
        return table or [extents(e) for e in range(experts)], layout

    def _conversions(self, layer: list[StreamedParameter]) -> list[WeightConversion]:
        names = {streamed.full_name for streamed in layer}
        conversions: list[WeightConversion] = []
        for name in sorted(names):
            conversion = self.by_target.get(name)
            if conversion is None:
                raise CheckpointError(
                    f"{self.checkpoint.folder}: the experts are missing: the checkpoint has no"
                    f" tensor for {name}"
                )
            shares = any(op.supports_many_to_many for op in conversion.operations)
            if shares or not names >= set(conversion.targets):
                raise UnsupportedModel(
                    f"{type(self.model).__name__}: this architecture is not supported: {name}"
                    " shares checkpoint tensors with other parameters"
                )
            if conversion not in conversions:
                conversions.append(conversion)
        return conversions

    def _check_equal(
        self,
        conversions: list[WeightConversion],
        parts: list[Sequence[list[SourceTensor]]],
        layer: list[StreamedParameter],
    ) -> None:
        """Check that all experts of a layer have tensors of equal shapes and types."""
        for conversion, by_expert in zip(conversions, parts, strict=True):
            if len({part.stored.encoding == PLAIN for part in by_expert[0]}) > 1:
                raise self._mixed_error(by_expert[0], conversion.targets[0])
            if isinstance(by_expert, StackedTensors) or (
                len({tuple((part.shape, part.kind) for part in tensors) for tensors in by_expert})
                == 1
            ):
                continue
            right = next(
                (tensors for tensors in by_expert if self._fits(conversion, tensors, layer)), None
            )
            if right is None:
                continue
            for part, other in (
                pair for tensors in by_expert for pair in zip(tensors, right, strict=True)
            ):
                if part.shape != other.shape:
                    raise CheckpointError(
                        f"{self.checkpoint.files[part.stored.file]}: the tensor {part.name} has"
                        f" shape {list(part.shape)}, but must have shape {list(other.shape)} to fit"
                        " the model's config: download the model again"
                    )
            raise mixed_types_error(by_expert, conversion.targets[0], self.checkpoint.folder)

    def _mixed_error(self, tensors: list[SourceTensor], target: str) -> UnsupportedModel:
        return mixed_types_error([[part] for part in tensors], target, self.checkpoint.folder)

    def _split_mixed(
        self, blocks: dict[str, list[Block]], tensors: list[SourceTensor]
    ) -> dict[str, list[Block]]:
        """Divide each matrix whose gate and up projection have different encodings.

        The blocks of the up projection get a name of their own, `<matrix>.up`, and count its rows
        from 0. Raises UnsupportedModel if gate and up are no two runs of rows, or have scales in
        tensors of their own.
        """
        split: dict[str, list[Block]] = {}
        for name, each in blocks.items():
            sources = [tensors[block.source] for block in each]
            if tensors[0].stored.encoding == PLAIN or len({part.kind for part in sources}) == 1:
                split[name] = each
                continue
            rows = [block.shape[0] * block.shape[1] for block in each]
            runs = [(block.target_start, block.target_strides[1]) for block in each]
            if runs != [(0, 1), (rows[0], 1)] or any(part.stored.companions for part in sources):
                raise self._mixed_error(tensors, name)
            split[name] = each[:1]
            split[f"{name}.{SECOND}"] = [replace(each[1], target_start=0)]
        return split

    def _fits(
        self,
        conversion: WeightConversion,
        tensors: list[SourceTensor],
        layer: list[StreamedParameter],
    ) -> bool:
        try:
            self._blocks(conversion, tensors, layer)
        except CheckpointError:
            return False
        return True

    def _blocks(
        self,
        conversion: WeightConversion,
        tensors: list[SourceTensor],
        layer: list[StreamedParameter],
    ) -> dict[str, list[Block]]:
        """Return the blocks that make each parameter from one expert's tensors, by its name."""
        targets = {s.full_name: s for s in layer if s.full_name in conversion.targets}
        key = (
            id(conversion.converter),
            tuple((p.shape, p.stored.encoding != PLAIN, p.stored.transposed) for p in tensors),
            tuple((s.name, s.shape) for s in targets.values()),
        )
        if key not in self.block_cache:
            self.block_cache[key] = derive_blocks(
                self.model, self.checkpoint, conversion, tensors, targets
            )
        return self.block_cache[key]


def _copies(
    stored: StoredTensor, source: int, blocks: dict[str, list[Block]], layout: SlotLayout
) -> list[list[Copy]]:
    """Return the byte copies from one of an expert's checkpoint tensors to a memory slot.

    There is one list for each stored tensor (codes, scales); `source` is the number by which
    `blocks` refer to the checkpoint tensor.
    """
    plans = []
    for i, tensor in enumerate(stored.parts):
        copies: list[Copy] = []
        for name, target_blocks in blocks.items():
            second = name.endswith(f".{SECOND}")
            spec = layout[name] if second else layout.weight(name).parts[i]
            for block in (block for block in target_blocks if block.source == source):
                if stored.encoding != PLAIN:
                    unit = stored.codes[0] // tensor.shape[0]
                    block = elements_of(block, unit, tensor.shape[1])
                arranged = arranged_copy if tensor.form else copy_of
                copies.append(arranged(block, tensor, spec))
        plans.append(sorted(copies, key=lambda copy: copy.source))
    return plans


def _layout(
    layer: list[StreamedParameter],
    order: list[str],
    parts: list[Sequence[list[SourceTensor]]],
    blocks: list[dict[str, list[Block]]],
) -> SlotLayout:
    """Return the layout of an expert's memory slot, in the order of its bytes on disk.

    So an expert whose tensors are adjacent in the file is one run of bytes in the slot too.
    """
    parameters = {streamed.name: streamed for streamed in layer}
    place: dict[str, tuple[int, int]] = {}
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    encodings: dict[str, str] = {}
    for by_expert, blocks_of in zip(parts, blocks, strict=True):
        for name, target_blocks in blocks_of.items():
            first = by_expert[0][target_blocks[0].source].stored
            matrix, _, second = name.partition(".")
            streamed, plain, kinds = parameters[matrix], first.encoding == PLAIN, [""]
            if second:
                encodings[matrix] += MIXED + first.encoding
            elif not plain:
                encodings[name] = first.encoding
                kinds += ENCODINGS[first.encoding].companions
            outputs = sum(block.shape[0] * block.shape[1] for block in target_blocks)
            for kind, tensor in zip(kinds, first.parts, strict=True):
                key = f"{name}.{kind}".rstrip(".")
                place[key] = tensor.file, tensor.offset
                if plain:
                    tensors[key] = streamed.shape[1:], str(streamed.dtype)[6:]
                    continue
                rows = outputs * tensor.shape[0] // first.codes[0]
                dtype = ENCODINGS[first.encoding].dtype(kind, tensor.dtype)
                tensors[key] = (rows, tensor.shape[1]), dtype
    if set(order) != set(tensors):
        order = sorted(tensors, key=lambda name: place[name])
    dtype = str(layer[0].dtype)[6:]
    return SlotLayout.pack([(name, *tensors[name]) for name in order], encodings, dtype)


def _pack_catalog(
    pack: Pack, model: PreTrainedModel, layers: Sequence[list[StreamedParameter]]
) -> PackCatalog:
    """Make a pack's catalog; raise CheckpointError if its experts do not fit the config."""
    names = [layer.name for layer in pack.header.layers]
    if names != [layer[0].module for layer in layers]:
        raise CheckpointError(
            f"{pack.folder / HEADER}: the layers in this file are not those of the model's config:"
            " make the pack again"
        )
    for layer, streamed in zip(pack.header.layers, layers, strict=True):
        _check_packed(pack, model, layer, streamed)
    dtypes = [{each.name: str(each.dtype)[6:] for each in layer} for layer in layers]
    dtype = pack.header.dtype
    if pack.header.precision and any({*layer.values()} != {dtype} for layer in dtypes):
        raise UsageError(
            f"{pack.folder}: this pack has low-precision copies, so its model computes only in"
            f" {dtype}: leave out --dtype"
        )
    return catalog_of(pack.header, pack.folder, dtypes)


def _check_packed(
    pack: Pack, model: PreTrainedModel, layer: PackLayer, streamed: list[StreamedParameter]
) -> None:
    transposed = model.get_submodule(layer.name).is_transposed
    for each in streamed:
        try:
            weight = layer.layout.weight(each.name)
        except StopIteration:
            raise CheckpointError(
                f"{pack.folder / HEADER}: the parameter {each.full_name} is missing: make the pack"
                " again"
            ) from None
        flip = transposed and weight.encoding != PLAIN
        shape = (layer.experts, *weight.shape[:: -1 if flip else 1])
        if shape != each.shape:
            raise CheckpointError(
                f"{pack.folder / HEADER}: the parameter {each.full_name} has shape {list(shape)},"
                f" but must have shape {list(each.shape)} to fit the model's config: make the pack"
                " again"
            )
