"""The catalog of a pack for a model, whose config must agree with the pack's header."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from greenroom.core.layout import PLAIN
from greenroom.errors import CheckpointError, UsageError
from greenroom.hf.checkpoint.pack.catalog import PackCatalog, catalog_of
from greenroom.hf.checkpoint.pack.format import HEADER, Layer
from greenroom.hf.checkpoint.pack.reading import Pack
from greenroom.hf.index.experts import Streamed


def pack_catalog(
    pack: Pack, model: PreTrainedModel, layers: Sequence[list[Streamed]]
) -> PackCatalog:
    """The catalog for a model, which is on the meta device; CheckpointError where the pack's
    experts are not those of its config."""
    names = [layer.name for layer in pack.header.layers]
    if names != [layer[0].module for layer in layers]:
        raise CheckpointError(f"{pack.folder / HEADER}: has other layers than the config says")
    for layer, streamed in zip(pack.header.layers, layers, strict=True):
        _check(pack, model, layer, streamed)
    dtypes = [{each.name: str(each.dtype)[6:] for each in layer} for layer in layers]
    own = pack.header.dtype
    if pack.header.precision and any({*layer.values()} != {own} for layer in dtypes):
        raise UsageError(f"{pack.folder}: a pack with copies computes in {own}: leave out --dtype")
    return catalog_of(pack.header, pack.folder, dtypes)


def _check(pack: Pack, model: PreTrainedModel, layer: Layer, streamed: list[Streamed]) -> None:
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
