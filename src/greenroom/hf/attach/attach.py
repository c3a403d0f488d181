"""The object `model.greenroom`: the expert cache of a loaded model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from transformers import PreTrainedModel

from greenroom.core.cache.buffer import default_borrow_limit
from greenroom.core.events import Idle, Resized
from greenroom.errors import ClosedError, UnsupportedCall
from greenroom.hf.attach import module_guard
from greenroom.hf.attach.bindings import Bindings
from greenroom.hf.attach.devices import change_devices, device_names
from greenroom.hf.attach.drivers import close_on_error, make_driver
from greenroom.hf.attach.materialize import check as check_materialize
from greenroom.hf.attach.materialize import materialize
from greenroom.hf.attach.pass_hooks import Observer, PassHooks
from greenroom.hf.attach.predictors import prefetch_predictors, running_predictor
from greenroom.hf.attach.statistics import collect_stats, totals
from greenroom.hf.attach.task_pins import TaskPins
from greenroom.hf.history import split_counts
from greenroom.hf.history.split_counts import HeadTimer, SplitCounts
from greenroom.hf.history.warm_start import LIMIT_S, WarmStart, warm_up
from greenroom.hf.memory.budget import experts_per_token
from greenroom.hf.memory.devices import engines_for, host_computes, kernels_of
from greenroom.hf.memory.pressure import FixedSlots, LimitedSlots, PressureWatcher
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slot_budget import SlotBudget
from greenroom.hf.memory.slots import in_kernel_order, open_store, slots_for
from greenroom.hf.variants.routing import VariantRouting
from greenroom.plan.history import files, recent
from greenroom.plan.history.recent import RecentRouting
from greenroom.predictors import predictor
from greenroom.predictors.helpers.compiling import compile_predictor
from greenroom.runtime.driver.copier import Store
from greenroom.runtime.driver.stats import Stats
from greenroom.runtime.driver.timeline import Timeline
from greenroom.runtime.kernels.base import Kernel
from greenroom.runtime.kernels.dense.stored import dense_bytes
from greenroom.runtime.kernels.table import make_kernel


class Greenroom:
    """Expert cache of a loaded model, available as `model.greenroom`.

    It reads experts from disk into memory slots as the model needs them.
    """

    original_generation_config: Any = None  # before `load` changed it
    warm_experts = 0  # experts that were read because of earlier runs
    process_bytes: int | None = None  # without dense parts and slots; None: not measured
    pressure: PressureWatcher | None = None  # None: the cache never shrinks for other processes
    on_growth: Callable[[], None] = staticmethod(lambda: None)  # after slots were taken again
    _head_timer: HeadTimer | None = None

    def __init__(
        self, model: PreTrainedModel, setup: ModelSetup, store: Store | None = None,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:  # fmt: skip
        """Attach an expert cache that reads from `store`, or from the checkpoint's files."""
        module_guard.remove(model)  # an earlier cache's guard refuses to move modules to a device
        self._model, self.setup = weakref.ref(model), (setup := in_kernel_order(setup))
        self.kernel: Kernel = make_kernel(kernels_of(setup))
        modules = [model.get_submodule(name) for name in setup.catalog.layers]
        predictors = None
        if setup.capacity < setup.catalog.experts:
            predictors = prefetch_predictors(
                model, setup.router_catalog, setup.prefetch, setup.predictor, setup.fingerprint
            )
        name, self.predictor = running_predictor(predictors, setup.variants)
        self._gate_inputs = predictors.capture_inputs() if predictors else None
        key = setup.fingerprint if setup.remember else ""
        history = files.load_routing(key) if key else None
        self._split_counts = SplitCounts.of(setup, history)
        records_routing = key and files.is_enabled() and not model.config.is_encoder_decoder
        recent = RecentRouting(setup.catalog.offsets, history) if records_routing else None
        self._recent_routing = recent
        co_compute = host_computes(setup)
        self._top_k = predictors.shape.top_k if predictors else experts_per_token(model)
        borrows = predictors or co_compute or setup.config.proposes()
        self._ahead = default_borrow_limit(self._top_k) if borrows else 0
        self.engines = engines_for(setup)
        self.engine = self.engines[0] if self.engines else None
        store, self.direct = open_store(setup, store)
        with close_on_error(store):
            self.driver, self._host_tier = make_driver(
                setup, store, self.engines, self.predictor, self._top_k, self._ahead, co_compute,
                progress,
            )  # fmt: skip
        if self._split_counts is not None:
            self._split_counts.forecast = self.driver.scheduler.view.forecast
        self._warm_start = WarmStart(key, self.driver, history, name, self.predictor)
        self._close = weakref.finalize(model, self.driver.close)
        self._fixed_slots, self._resize_lock = setup.capacity, threading.Lock()
        self._slots_each = setup.capacity / self.driver.pieces.equal_devices  # on each device
        self._stats_base = totals(self.driver, self._host_tier)
        self.bindings = Bindings(self.kernel, modules, setup, self.engines, self.driver)
        optional = self._split_counts, recent
        observers: list[Observer] = [each for each in optional if each is not None]
        self.hooks = PassHooks(setup, self.driver, self.bindings, observers, self.predictor)
        on_routing = self.hooks.on_routing if observers or setup.pins is not None else None
        try:
            self.bindings.bind(model, self._gate_inputs, on_routing)
            self.hooks.install(model)
            self._head_timer = HeadTimer(model) if setup.counts_split else None
            if self._split_counts is not None:
                self.hooks.between_requests = self.reconfigure
            dense = self.bindings.accelerated
            compiled = dense.compiled if dense is not None else set()
            self.hooks.check_weights = module_guard.make_address_check(model, modules, compiled)
            module_guard.install(model, compiled)
        except BaseException:
            self.detach()
            raise

    @property
    def slot_budget(self) -> SlotBudget | None:
        """Return the memory budget that expert slots and KV cache share.

        None if the number of slots is fixed (`--cache`, or after `resize`).
        """
        return self.hooks.slot_budget

    @property
    def memory_bytes(self) -> int | None:
        """Return the resident bytes that the process reaches when all expert slots are filled.

        The figure is for short contexts and can be compared with `stats().peak_rss_bytes`. None on
        a GPU, or if the memory of the process was not measured.
        """
        if self.process_bytes is None or (model := self._model()) is None:
            return None
        slot_budget = self.slot_budget  # `resize` in another thread removes it
        slots = self.capacity if slot_budget is None else slot_budget.decode_slots()
        return self.process_bytes + dense_bytes(model) + slots * self.setup.catalog.slot_bytes

    @property
    def variants(self) -> VariantRouting | None:
        """Return what redirects tokens to the experts of their variants; None without adapters."""
        return self.bindings.variants

    @property
    def capacity(self) -> int:
        """Return the number of experts that the expert cache has room for."""
        return self.driver.scheduler.capacity

    def compile(self) -> None:
        """Compile the code that computes experts, and the expert predictor's code."""
        self.bindings.compile(self._top_k)
        if self.predictor is not None:
            compile_predictor(predictor(self.predictor.name))

    def pin(self) -> None:
        """Apply `--pin`: never evict the experts of the task that a prompt resembles.

        The tasks and their experts are those in the file of `--pin`. Without it, nothing happens.
        Raises BudgetError if a task's experts leave too few slots to compute a token when the KV
        cache is full.
        """
        setup = self.setup
        if setup.pins is not None:
            fewest = (
                self.slot_budget.full_context_slots
                if self.slot_budget is not None
                else self.capacity
            )
            view, sets = self.driver.scheduler.view, setup.pins.sets
            for each in sets:
                view.check_capacity(fewest, each)
            view.pinned_sets = sets
            self.hooks.observers.append(TaskPins(setup.pins, self.driver))

    def reconfigure(self, idle: bool = True) -> None:
        """Divide the slots among layers anew every tau tokens, with `--split auto`.

        `idle` is whether the model computes no prompt or answer now; otherwise nothing happens.
        """
        if idle and self._split_counts is not None and self._head_timer is not None:
            divided = self._split_counts.reconfigure(self.driver, self._head_timer.seconds)
            if divided and (slot_budget := self.slot_budget) is not None:
                slot_budget.release_excess()

    def warm_up(self) -> None:
        """Fill the cache with the experts that earlier runs used most; restart the statistics."""
        scheduler = self.driver.scheduler
        # These reads say nothing about the pace of steps.
        scheduler.on(Resized(self.capacity, ahead=0))
        self.warm_experts = self._warm_start.warm_up()
        if self.setup.pins is not None and (pinned := self.setup.pins.first).size:
            self.warm_experts += warm_up(self.driver, pinned, LIMIT_S)
        scheduler.on(Resized(self.capacity, ahead=self._ahead))
        self.reset_stats()

    def prefetch_idle(self) -> None:
        """Read the experts of highest expected use into free slots, until the next forward pass."""
        if self.driver.scheduler.view.free_slots:
            self.driver.send(Idle(self._warm_start.expected_use()))

    def stats(self) -> Stats:
        """Return the expert cache's statistics since loading, or since the last `reset_stats`."""
        return collect_stats(self, self._host_tier, self._stats_base)

    def reset_stats(self) -> None:
        """Restart the expert cache's statistics at 0; cached experts stay in memory."""
        self._stats_base = totals(self.driver, self._host_tier)
        self.driver.capacity_range = self.capacity, self.capacity
        self.driver.scheduler.view.accuracy.reset()

    def timeline(self, on: bool = True) -> Timeline | None:
        """Start or stop recording the times of expert reads and computations.

        `on=True` starts a new recording and returns it. `on=False` stops recording and returns
        what was recorded, or None if nothing was.
        """
        self.driver.predictions.drain()
        recorded, sizes = self.driver.timeline, self.setup.catalog.experts_per_layer
        self.driver.timeline = Timeline(experts_per_layer=sizes) if on else None
        self.driver.predictions.timeline = self.driver.timeline
        return self.driver.timeline if on else recorded

    def resize(self, cache: str | int) -> int:
        """Change the size of the expert cache: "25%" of the experts, "2GiB", or bytes.

        The model may be in use. The policy evicts experts that no longer fit, and their memory
        returns to the system. From then on the size is fixed: it no longer shrinks as the KV cache
        grows. Returns the number of slots. Raises ClosedError after `detach`, UsageError or
        BudgetError for an impossible size, and DeviceError without memory for it; nothing has
        changed then.
        """
        self._check_open()
        slots = slots_for(cache, self.setup.catalog, "cache")
        with self._resize_lock:
            if self.slot_budget is None:
                self.driver.resize(slots)
            else:
                self.slot_budget.retire(slots)
            self.hooks.slot_budget, self._fixed_slots = None, slots
            self._slots_each = slots / self.driver.pieces.equal_devices
        return self.capacity

    def use_devices(self, device: str) -> int:
        """Distribute the experts over other devices of those that the model was loaded on.

        `device` names them as `--device` does: "cuda:0,cuda:1". The model may be in use; its output
        does not change. Each device has as many slots as before. Returns the number of slots.
        Raises ClosedError after `detach`, UsageError for devices that the model was not loaded on,
        BudgetError or DeviceError if there is too little memory; nothing has changed then.
        """
        self._check_open()
        with self._resize_lock:
            each = self._slots_each
            change_devices(device, self.setup, self.driver, self.slot_budget, each)
            self._fixed_slots = self.capacity
        return self.capacity

    @property
    def devices(self) -> list[str]:
        """Return the names of the devices that have experts; empty without a GPU."""
        return device_names(self.setup, self.driver.pieces.active_devices)

    def _check_open(self) -> None:
        if not self._close.alive:
            raise ClosedError(
                "the expert cache of this model was detached and cannot be resized: load the model"
                " again with greenroom.load"
            )

    def use_slot_budget(self, slot_budget: SlotBudget) -> None:
        """Resize the expert cache when the KV cache grows: both share one memory budget."""
        slot_budget.bind(self.driver, self.bindings.reads_in_place)
        self.driver.capacity_range = self.capacity, self.capacity
        self.hooks.slot_budget = slot_budget

    def watch_pressure(self, min_slots: int, fixed: bool) -> None:
        """Let the expert cache shrink while other processes need memory, to at least `min_slots`.

        `fixed` is whether this holds also for a fixed number of slots (`--cache`, or `resize`).
        """
        driver, ref = self.driver, weakref.ref(self)

        def slots() -> LimitedSlots | None:
            if (greenroom := ref()) is None:
                return None
            if (slot_budget := greenroom.slot_budget) is None and fixed:
                return FixedSlots(driver, greenroom._fixed_slots)
            return slot_budget

        setup = self.setup
        self.pressure = PressureWatcher(
            driver,
            setup.catalog.slot_bytes,
            setup.budget_bytes,
            slots,
            self._resize_lock,
            min_slots,
            on_growth=lambda: greenroom.on_growth() if (greenroom := ref()) is not None else None,
        )
        weakref.finalize(self, self.pressure.stop)

    def close(self) -> None:
        """Close the expert cache: end its threads, free its slots, save what the run has learned.

        A forward pass then raises ClosedError. Weights stay as they are: a program that ends does
        not need them dequantised, and may have no memory for it. A second call does nothing.
        """
        if self.pressure is not None:
            self.pressure.stop()
        if self._close.alive:
            self._close()
            counted = None
            if self._split_counts is not None and self._head_timer is not None:
                counted = self._split_counts.state(self.driver, self._head_timer.seconds)
            routing = self._recent_routing.state() if self._recent_routing is not None else None
            states = {split_counts.NAME: counted, recent.NAME: routing}
            self._warm_start.save(states)

    def detach(self) -> None:
        """Detach the expert cache: close it and remove its hooks.

        All weights but the experts are then ordinary parameters, dequantised; only embeddings on
        disk stay there. A forward pass raises ClosedError, and saving raises UnsupportedCall.
        `materialize` can still read the experts, and `stats` keeps its last values. A second call
        does nothing.
        """
        self.close()
        if self._head_timer is not None:
            self._head_timer.close()
        self.hooks.detach()
        self.bindings.detach()
        for engine in self.engines:
            engine.drop_graphs()
        if self._gate_inputs is not None:
            self._gate_inputs.detach()

    def materialize(self) -> PreTrainedModel:
        """Detach the expert cache, and read all experts into ordinary parameters of the model.

        The model then equals what `from_pretrained` loads, with quantised weights dequantised
        to the model's dtype. It generates without Greenroom, and can be trained, saved, moved and
        copied. All experts must fit into memory. Returns the model, now without the attribute
        `greenroom`.

        Raises UnsupportedCall, UnsupportedModel, BudgetError or CheckpointChanged before anything
        is changed. Raises CheckpointError if reading fails; the expert cache is then detached.
        """
        model: Any = self._model()
        if model is None or getattr(model, "greenroom", None) is not self:
            raise UnsupportedCall(
                "materialize: this expert cache no longer belongs to its model, which was"
                " materialised, loaded again or freed: call greenroom.load again"
            )
        if self.setup.subset is not None:
            raise UnsupportedCall(
                f"materialize: {self.setup.subset.description} are here: load the complete model"
            )
        freed = self.capacity * self.setup.catalog.slot_bytes if self._close.alive else 0
        source = check_materialize(model, self.setup.source, 0 if self.engine else freed)
        self.detach()
        materialize(model, source)
        if self.original_generation_config is not None:
            model.generation_config = self.original_generation_config
        del model.greenroom
        return model

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedCall(
            "model.greenroom cannot be pickled or copied (it has open files and threads): call"
            " greenroom.load again where the model is needed"
        )
