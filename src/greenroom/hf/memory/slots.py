"""Make the slots of a model's expert cache, and open the files that fill them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from greenroom.config import Amount
from greenroom.core.cache.scope import Scope
from greenroom.core.cache.state import pool_sizes
from greenroom.core.layout import Catalog
from greenroom.core.pieces import Pieces
from greenroom.core.transfers.tiers import HostTier, host_slot_groups, least_host_slots
from greenroom.errors import BudgetError, UsageError
from greenroom.hf.checkpoint.pack.catalog import CopiesCatalog, PackCatalog
from greenroom.hf.checkpoint.pack.checked import disk_store
from greenroom.hf.memory.devices import kernels_of, lanes_of
from greenroom.hf.memory.setup import ModelSetup
from greenroom.json_file import printable
from greenroom.policies import policy as named_policy
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.cuda.slots import DeviceSlots, segment_bytes
from greenroom.runtime.driver.copier import Store
from greenroom.runtime.fakes import FakeSlots, FakeStore
from greenroom.runtime.kernels import panel_order
from greenroom.runtime.kernels.table import GPU_KERNEL
from greenroom.runtime.slots import block_fields
from greenroom.runtime.slots.host import HostSlots
from greenroom.runtime.slots.nested_planes import PlaneJoiner
from greenroom.runtime.slots.tier import MultiPoolTier, Sizes, SlotPool, Tier
from greenroom.runtime.store.disk import Chunk

Chunks = Sequence[tuple[Chunk, ...]]


def slots_for(cache: str | int | Amount, catalog: Catalog, what: str = "--cache") -> int:
    """Return the number of expert slots in an expert cache of a given size.

    It is at most the number of experts.

    cache: bytes, or a share of all experts
    what:  the option's name, for error messages
    Raises BudgetError if not even one expert fits.
    """
    amount = Amount.parse(cache, what)
    if amount.share is not None:
        slots = amount.of(catalog.experts)
    else:
        slots = amount.of(0) // catalog.slot_bytes
    if slots < 1:  # the share is rounded up, so that it is enough
        raise BudgetError(
            f"{what} {printable(cache)} has no room for an expert: give at least"
            f" {catalog.slot_bytes} bytes, or {-(-10_000 // catalog.experts) / 100:.2f}% of the"
            f" {catalog.experts} experts"
        )
    return min(slots, catalog.experts)


def in_kernel_order(setup: ModelSetup) -> ModelSetup:
    """Return a setup whose experts lie in slots in the order of its kernels.

    On a CPU that is the order of panels, on a GPU the order of fields. For a CPU, experts in
    segments or with copies, and those that pass through host memory, stay in the order of files.
    """
    kernels, parts = kernels_of(setup), setup.split or setup.copies
    if setup.cuda and kernels == GPU_KERNEL:
        return replace(setup, catalog=block_fields.in_fields(setup.catalog))
    if kernels in panel_order.KERNELS and len(lanes_of(setup)) == 1 and not parts:
        return replace(setup, catalog=panel_order.in_panels(setup.catalog))
    return setup


def pieces_of(setup: ModelSetup, chunks: Sequence[int] | None = None) -> Pieces:
    """Return the sizes and home devices of all experts, expert segments and copies.

    Each of these pieces is loaded into a slot of its own. `chunks` has the number of file chunks of
    each piece. Raises UsageError if the experts' format does not work with this run's devices.
    """
    catalog = setup.catalog
    if setup.cuda or len(setup.devices) > 1 or setup.host_capacity:
        _check_parts(setup)
    devices, active = len(setup.devices), range(setup.active_devices)
    if setup.copies is not None:
        return Pieces.with_copies(
            catalog.offsets, setup.copies, chunks, devices, active, setup.placement.name
        )
    if setup.split is not None:
        return Pieces.with_split(
            catalog.offsets, setup.split, chunks, devices, active, setup.placement.name
        )
    nbytes = [layout.nbytes for layout in catalog.layouts]
    return Pieces.unsplit(catalog.offsets, nbytes, chunks, devices, active, setup.placement.name)


def _check_parts(setup: ModelSetup) -> None:
    """Raise UsageError for formats of experts that this run's devices and options do not allow."""
    catalog = setup.catalog
    segments = any(layout.segments for layout in catalog.layouts)
    nested = isinstance(catalog, CopiesCatalog) and bool(catalog.nested_layouts)
    if nested and setup.config.uses_host():
        raise UsageError(
            "this pack's int8 experts contain int4 copies, which are joined with the rest in the"
            " GPU's slots, not in host memory: leave out --co-compute"
        )
    if not segments and not setup.approximates_misses:
        return
    if segments:
        what, remedy = "this pack's experts are in segments", "pack the model without --segments"
    else:
        what = "--miss-precision, --skip-below and --substitute-below are set"
        remedy = "leave them out"
    if setup.config.uses_host() and setup.host_capacity:
        raise UsageError(
            f"{what}, which excludes --co-compute auto: leave out --co-compute, or {remedy}"
        )


def open_store(setup: ModelSetup, replacement: Store | None) -> tuple[Store, bool]:
    """Open the store that experts are read from: the checkpoint's files, or `replacement`.

    Returns the store, and whether its reads bypass the page cache. Reads are slowed down to the
    run's read limit, if there is one.
    """
    if replacement is not None:
        store, direct = replacement, True
    else:
        disk = disk_store(setup.catalog, setup.direct)
        store, direct = disk, disk.direct
    if setup.read_limit is not None:
        store = FakeStore(store, bandwidth=setup.read_limit)
    if setup.fake:
        store = FakeStore(store, jitter=0.002, seed=setup.seed)
    return store, direct


def chunks_in(store: Store, setup: ModelSetup) -> Chunks:
    """Return the file chunks of every expert, expert segment or low-precision copy, by id.

    An id that no file has data for gets ().
    """
    catalog = setup.catalog
    pieces, count = set(range(catalog.experts)), catalog.experts
    if isinstance(catalog, PackCatalog) and (setup.split or setup.copies):
        pieces = set(catalog.pieces)
        count *= 3 if setup.copies is not None and setup.copies.remainder else 2
    return [store.chunks(piece) if piece in pieces else () for piece in range(count)]


def make_slots(setup: ModelSetup, pieces: Pieces, engines: Sequence[Engine]) -> Tier:
    """Make the slots of the expert cache, `setup.capacity` in all, in the devices' memory.

    Top segments of split experts have slots of one size in each layer, or one size in all layers if
    they share slots. Bottom segments and low-precision copies have slots of their own.
    """
    catalog, copies, split = setup.catalog, setup.copies, setup.split
    strides, most = [catalog.slot_bytes], [catalog.experts]  # of each kind of slots
    if split is not None and setup.scope == "shared":
        strides, most = [max(split.tops)], [pieces.offsets[-1]]
    elif split is not None:
        strides, most = list(split.tops), [b - a for a, b in pairwise(pieces.offsets)]
    exact = len(strides)  # kinds of slots for exact experts, the first ones
    if split is not None:
        strides.append(max(split.bottoms))
    elif copies is not None:
        strides.append(max(copies.low))
    most += [sum(pieces.secondary_slots)] * (len(strides) - exact)

    def sizes_for(scope: Scope) -> Sizes:
        return lambda capacity: pool_sizes(pieces, capacity, scope)

    sizes, devices = sizes_for(setup.scope), pieces.devices
    counts = sizes(setup.capacity)
    if len(counts) == 1:
        counts = [setup.capacity]
    slot_pools: list[SlotPool]
    nestings = catalog.nested_layouts if isinstance(catalog, CopiesCatalog) else ()
    joins = [
        PlaneJoiner(nestings) if nestings and split is None and n < exact * devices else None
        for n in range(len(counts))
    ]
    of = [n // devices for n in range(len(counts))]  # the kind of each pool
    sized = zip(counts, [strides[n] for n in of], [most[n] for n in of], joins, strict=True)
    if engines:
        kinds = len(counts) // devices
        slot_pools = [
            DeviceSlots(engine, *each, segment_bytes(kinds))
            for engine, each in zip([*engines] * kinds, sized, strict=True)
        ]
    else:
        kind = FakeSlots if setup.fake else HostSlots
        slot_pools = [
            kind(*each, plane_joiner=joiner, panel_order=panel_order.Panels())
            for *each, joiner in sized
        ]
    return (
        MultiPoolTier(slot_pools, setup.capacity, sizes, sizes_for, devices)
        if len(slot_pools) > 1
        else slot_pools[0]
    )


def host_tier(setup: ModelSetup, pieces: Pieces) -> HostTier | None:
    """Make the cache of a GPU's experts in host memory; None if it has too few slots."""
    if setup.host_capacity < least_host_slots(pieces):
        return None
    return HostTier(pieces, setup.host_capacity, named_policy(setup.host_policy))


def make_host_memory(
    setup: ModelSetup,
    pieces: Pieces,
    chunks: Chunks,
    staging_slots: int,
    engines: Sequence[Engine],
    computes: bool,
) -> HostMemory:
    """Make the host memory between disk and GPU: staging slots, and slots of cached experts.

    computes: whether cached experts have the layout from which the CPU can compute them
    """
    capacity = setup.host_capacity
    nodes, groups = [], None
    if pieces.split is not None or pieces.copies is not None:
        fits = capacity >= least_host_slots(pieces)
        groups = host_slot_groups(pieces, capacity) if fits else []
        each = len(groups) // 2 // len(setup.devices) if groups else 1  # of a device
        sizes = [size for size, _ in groups]
    elif capacity >= len(setup.devices):
        each, sizes = 1, pieces.slots_per_device(capacity)
    else:
        each, sizes = 1, []
    if engines:
        nodes = [(n, engines[i // each % len(engines)].node) for i, n in enumerate(sizes)]
    engine = engines[0] if engines else Engine()
    stride = setup.catalog.slot_bytes if computes else None
    return HostMemory(engine, chunks, staging_slots, capacity, nodes, stride, groups)
