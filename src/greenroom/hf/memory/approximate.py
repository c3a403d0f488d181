"""Set up approximate cache misses: low-precision copies of experts, and their slots.

A miss is approximate if the missing expert is left out, or if its low-precision copy or another
expert is computed instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from greenroom.config import INEXACT, SchedulerConfig, options_in
from greenroom.core.config.base import Approximation
from greenroom.core.layout import Catalog
from greenroom.core.pieces import Copies
from greenroom.errors import UsageError
from greenroom.hf.checkpoint.pack.catalog import CopiesCatalog, PackCatalog
from greenroom.hf.memory.setup import ModelSetup
from greenroom.runtime.kernels.approximate import ExpertsWithCopies
from greenroom.runtime.slots.tier import SlotPool

APPROXIMATION_OPTIONS = tuple(
    each.name for each in options_in(SchedulerConfig) if each.metadata["group"] == INEXACT
)


def check_copies(catalog: Catalog, at: Approximation | None) -> None:
    """Check that a checkpoint has the low-precision expert copies that `--miss-precision` needs.

    Raises UsageError otherwise, which names the command that makes a pack with copies.
    """
    if at is None or not at.low:
        return
    precision = at.precision
    packed = catalog.header.precision if isinstance(catalog, PackCatalog) else ""
    if packed != precision:
        has = f"this pack has copies in {packed}" if packed else "this checkpoint has none"
        raise UsageError(
            f"--miss-precision {precision} needs copies of the experts in {precision}, and {has}:"
            " make a pack that has them with `greenroom pack MODEL -o OUT --experts same"
            f" --miss-precision {precision}` and run that"
        )


def copies_of(catalog: Catalog, at: Approximation | None, room: int, top_k: int) -> Copies | None:
    """Return the sizes of a pack's low-precision expert copies, and the number of their slots.

    The slots take `--low-share` of the memory of `room` experts, but hold at least the
    `top_k` copies that a token may need. The result is None if no copies are used.
    """
    if at is None or not at.low:
        return None
    assert isinstance(catalog, CopiesCatalog)
    exact, low, remainder = catalog.copy_bytes()
    share = int(at.share * room * catalog.slot_bytes + 1e-9)
    most = catalog.experts
    return Copies(exact, low, remainder, min(most, max(top_k, share // max(low))))


def approximate_layer(
    setup: ModelSetup, module: nn.Module, layer: int, pools: Sequence[SlotPool]
) -> ExpertsWithCopies:
    """Make the experts module of a layer whose cache misses may be approximate.

    An approximate miss leaves the expert out, or computes its low-precision copy or another expert.

    module: the layer's experts module
    layer:  the layer's number among the MoE layers
    pools:  the slots of experts, and of low-precision copies if the run has any
    Raises UsageError if `--substitute-below` is set and the experts have biases.
    """
    layout, catalog, low = setup.catalog.layouts[layer], setup.catalog, None
    if setup.copies is not None:
        assert isinstance(catalog, CopiesCatalog)
        of = catalog.layers_with_copies[layer].low_copy
        assert of is not None
        low = of.layout, pools[-1]
    assert setup.approximation is not None
    if setup.approximation.substitute and module.has_bias:
        raise UsageError(
            "--substitute-below replaces an expert's matrices by another's, and the experts of this"
            " model have biases too: leave the option out"
        )
    return ExpertsWithCopies(module, layout, pools[0], low)
