"""Make the driver of a model's expert cache: scheduler, slots, memory between disk and GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from greenroom.core.build import build_scheduler
from greenroom.core.predictor import Predictor
from greenroom.core.prefetch.foresight import Foresight
from greenroom.core.prefetch.guard import Guard
from greenroom.core.transfers.tiers import HostTier
from greenroom.hf.attach.predictors import runs_in_worker
from greenroom.hf.memory.devices import kernels_of, lanes_of, links_of
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slots import chunks_in, host_tier, make_host_memory, make_slots, pieces_of
from greenroom.hf.mtp.layer import without_mtp
from greenroom.policies import policy as named_policy
from greenroom.runtime.cuda.calibrate import nominal_costs
from greenroom.runtime.cuda.engine import Engine
from greenroom.runtime.cuda.slot_table import SlotTable
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.driver.copier import Store
from greenroom.runtime.driver.driver import Driver
from greenroom.runtime.kernels.table import GPU_KERNEL


@contextlib.contextmanager
def close_on_error(store: Store) -> Iterator[None]:
    """Close a store if what is inside fails; else its driver closes it."""
    try:
        yield
    except BaseException:
        store.close()
        raise


def make_driver(
    setup: ModelSetup,
    store: Store,
    engines: Sequence[Engine],
    predictor: Predictor | None,
    top_k: int,
    ahead: int,
    co_compute: bool,
    progress: Callable[[float], None],
) -> tuple[Driver, HostTier | None]:
    """Make the driver that loads experts from a store into slots.

    top_k:      experts that a token uses in a layer
    ahead:      slots that prefetches may borrow at a time
    co_compute: whether the host's CPU computes some of the missing experts too
    progress:   called with the share of the host memory that was registered with a GPU

    Returns the driver, and the cache of experts in host memory if a GPU computes and it has room.
    """
    chunks = chunks_in(store, setup)
    pieces = pieces_of(setup, [len(each) for each in chunks])
    slots = make_slots(setup, pieces, engines)
    tier, slot_bytes, lanes = host_tier(setup, pieces), setup.catalog.slot_bytes, lanes_of(setup)
    scheduler = build_scheduler(
        pieces,
        setup.capacity,
        named_policy(setup.policy),
        setup.config,
        costs=nominal_costs(slot_bytes) if co_compute else None,
        expert_bytes=slot_bytes,
        top_k=top_k,
        scope=setup.scope,
        lanes=lanes,
        ahead=ahead,
        seed=setup.seed,
        host=tier,
    )
    foresight = Foresight(predictor, without_mtp(setup.catalog).offsets) if predictor else None
    between = table = None
    with contextlib.ExitStack() as opened:  # an error must not leave host memory registered
        if len(lanes) > 1:
            staging = scheduler.view.staging_slots
            between = make_host_memory(setup, pieces, chunks, staging, engines, co_compute)
            opened.callback(between.close)
            between.pin(progress)
        if has_slot_table(setup):
            assert isinstance(slots, DeviceSlots)
            table = SlotTable(engines[0], slots, pieces.chunks.tolist())
        driver = Driver(
            *(scheduler, store, slots),
            foresight=foresight,
            guard=Guard() if setup.guard and predictor else None,
            predict_in_worker=runs_in_worker(predictor, setup.predict_in, setup.cuda),
            links=links_of(setup),
            host_memory=between,
            slot_table=table,
        )
        opened.pop_all()  # the driver closes it
    return driver, tier


def has_slot_table(setup: ModelSetup) -> bool:
    """Return whether a table on the GPU says which slot has an expert.

    Kernels for one token read it, if each expert is in one slot of one GPU.
    """
    if not setup.cuda or len(setup.devices) > 1 or kernels_of(setup) != GPU_KERNEL:
        return False
    exact = not setup.approximates_misses and setup.variants is None
    return exact and not setup.catalog.layouts[0].segments
