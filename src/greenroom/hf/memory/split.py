"""Split a pack's experts into a top segment for the cache and a bottom segment."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.core.layout import Catalog, SlotLayout
from greenroom.core.pieces import SECONDARY_SLOTS_PER_CHOICE, Split
from greenroom.errors import UsageError
from greenroom.hf.checkpoint.pack.catalog import PackCatalog


def split_experts(
    catalog: Catalog, shares: float | Sequence[float], top_k: int
) -> tuple[Catalog, Split | None]:
    """Split each layer's experts in a pack into a top and a bottom segment.

    shares: share of an expert's bytes in the top segment, one for all layers or one for each; the
            split is at the pack's nearest segment boundary
    Returns the catalog of top and bottom segments, and their sizes; the same catalog and None if no
    layer is split. Raises UsageError if the experts are not packed in segments, or if the number of
    shares is not the number of layers.
    """
    layers = len(catalog.layers)
    each = [shares] * layers if isinstance(shares, float) else list(shares)
    if len(each) != layers:
        raise UsageError(
            f"--split has {len(each)} numbers, but the model has {layers} MoE layers: give one"
            " number for all layers, or one for each"
        )
    if not isinstance(catalog, PackCatalog) or not any(x.segments for x in catalog.layouts):
        raise UsageError(
            "--split needs experts that are packed in segments: make such a pack with"
            " `greenroom pack MODEL -o OUT --experts same --segments 8` and run that"
        )
    cuts = [nearest(layout, share) for layout, share in zip(catalog.layouts, each, strict=True)]
    split_catalog = catalog.cut_at(cuts)
    tops, bottoms = split_catalog.piece_bytes()
    if not any(bottoms):
        return catalog, None
    most = min(catalog.experts_per_layer)
    return split_catalog, Split(
        tops, bottoms, max(2, min(SECONDARY_SLOTS_PER_CHOICE * top_k, 2 * most))
    )


def nearest(layout: SlotLayout, share: float) -> int:
    """Return how many of an expert's first segments come nearest to a share of it.

    `share` is the share of the expert's bytes, from 0 to 1.
    """
    ends = [segment.offset for segment in layout.segments[1:]] + [layout.nbytes]
    gaps = [abs(end / layout.nbytes - share) for end in ends]
    return 1 + gaps.index(min(gaps))
