"""What a run needs to serve misses with less: thresholds, and the copies that a pack must have."""

from __future__ import annotations

from greenroom.config import Amount, LoadConfig, thresholds_of
from greenroom.core.layout import Catalog
from greenroom.core.pieces import Copies
from greenroom.core.precision import Thresholds
from greenroom.errors import UsageError
from greenroom.hf.pack.copies import CopiesCatalog

LESSER = ("miss_precision", "low_below", "low_share", "skip_below", "substitute_below")


def thresholds(config: LoadConfig) -> Thresholds | None:
    """Those of a run; None where all is exact."""
    found = Thresholds(
        *thresholds_of(
            config.miss_precision, config.low_below, config.skip_below, config.substitute_below
        )
    )
    return found if found.most else None


def check_copies(catalog: Catalog, precision: str) -> None:
    """UsageError, which names the command that makes them, where a checkpoint has no copies."""
    if precision == "off":
        return
    there = ""
    if isinstance(catalog, CopiesCatalog):
        low = catalog.low_layers[0].low
        assert low is not None
        there = low.precision
    if there != precision:
        has = f"this pack's are in {there}" if there else "this checkpoint has none"
        raise UsageError(
            f"--miss-precision {precision} needs copies of the experts in {precision}, and {has}:"
            " make a pack that has them with `greenroom pack MODEL -o OUT --experts same"
            f" --miss-precision {precision}` and run that"
        )


def copies_of(catalog: Catalog, config: LoadConfig, room: int, top_k: int) -> Copies | None:
    """The copies of a pack, in slots that take their share of `room` whole experts; those of a
    token at least."""
    if config.miss_precision == "off":
        return None
    assert isinstance(catalog, CopiesCatalog)
    exact, low, rest = catalog.copy_bytes()
    share = Amount.parse(config.low_share, "--low-share").of(room * catalog.slot_bytes)
    most = catalog.experts
    return Copies(exact, low, rest, min(most, max(top_k, share // max(low))))
