"""Attach a cache of experts to a transformers model, and take it out again."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from greenroom.config import Amount
from greenroom.core.buffer import slots_ahead
from greenroom.core.cache import group_sizes
from greenroom.core.events import Resized
from greenroom.core.foresight import Foresight
from greenroom.core.guard import Guard
from greenroom.core.layout import Catalog
from greenroom.core.pieces import Pieces, Split
from greenroom.core.precision import LOW
from greenroom.core.predictor import Ids, PassBegins, Predictor
from greenroom.core.rates import Rates
from greenroom.core.scheduler import Scheduler
from greenroom.core.tiers import HostTier
from greenroom.errors import BudgetError, ClosedError, UsageError
from greenroom.hf import learned, watch
from greenroom.hf.budget import experts_per_token
from greenroom.hf.build import IMPLEMENTATION
from greenroom.hf.foresight import Beside, foresee
from greenroom.hf.growth import Growth
from greenroom.hf.kv import ROOM, adopt, reserve
from greenroom.hf.kv_bytes import KVBytes
from greenroom.hf.kv_kinds import DYNAMIC
from greenroom.hf.lesser import join_of, joining, layer_with_less, memory_of, slots_with_copies
from greenroom.hf.pack.checked import checked
from greenroom.hf.pack.copies import CopiesCatalog
from greenroom.hf.pack.format import PackCatalog
from greenroom.hf.parts import Parts
from greenroom.hf.pinned import Pinned
from greenroom.hf.recall import LIMIT_S, Recall, warm_up
from greenroom.hf.shared import Shared
from greenroom.hf.shared import attach as shared
from greenroom.hf.together import Together
from greenroom.hf.watch import Heard, Watch
from greenroom.policies import policy as named_policy
from greenroom.predictors import predictor
from greenroom.runtime.copier import Store
from greenroom.runtime.cuda.both import Both
from greenroom.runtime.cuda.calibrate import calibrate, nominal
from greenroom.runtime.cuda.engine import Cuda, Engine, Host
from greenroom.runtime.cuda.host import HostMemory
from greenroom.runtime.cuda.slab import Slab
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.cuda.spread import Spread, SpreadSlots
from greenroom.runtime.driver import Driver
from greenroom.runtime.fakes import FakeSlots, FakeStore
from greenroom.runtime.forward import BINDING, Binding, experts_forward, experts_onto
from greenroom.runtime.kernels import LayerExperts, described, kernel
from greenroom.runtime.kernels.accelerate import Accelerated, accelerate
from greenroom.runtime.kernels.fused import Fused
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.stored import put_back
from greenroom.runtime.kernels.table import ON_GPUS
from greenroom.runtime.lesser import Lessened
from greenroom.runtime.memory import peak_rss_bytes
from greenroom.runtime.meter import minus
from greenroom.runtime.nested import NestedSlots
from greenroom.runtime.segments import Segmented, SegmentedExperts
from greenroom.runtime.slots import HostSlots, SlotKinds
from greenroom.runtime.stats import (
    Stats,
    host_stats,
    lesser_stats,
    link_stats,
    prefetch_stats,
    split_stats,
)
from greenroom.runtime.store import DiskStore
from greenroom.runtime.timeline import Timeline

COMPILED = "numba", "unrounded"  # kernels that read dense matrices as they are stored
COMPILED_TOKENS = 64  # enough for the kernels to take the way of a prompt
IN_FLIGHT = 2  # chunks on their way to a GPU at a time: what is queued there cannot be recalled
LINKS = ("disk -> host", "host -> device")
AnySlots = HostSlots | NestedSlots | DeviceSlots | SpreadSlots | SlotKinds

log = logging.getLogger(__name__)

ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def slots_for(cache: str | int | Amount, catalog: Catalog, what: str = "--cache") -> int:
    """How many slots an amount of cache is; BudgetError where not even one expert fits."""
    amount = Amount.parse(cache, what)
    if amount.share is not None:
        slots = amount.of(catalog.experts)
    else:
        slots = amount.of(0) // catalog.slot_bytes
    if slots < 1:
        raise BudgetError(
            f"{what} {cache} holds no expert: one takes {catalog.slot_bytes} bytes"
            f" ({1 / catalog.experts:.2%} of the {catalog.experts} experts)"
        )
    return min(slots, catalog.experts)


def pieces_of(parts: Parts, chunks: Sequence[int] | None = None) -> Pieces:
    """All experts of a model, each with its home."""
    catalog = parts.catalog
    if parts.cuda or len(parts.devices) > 1 or parts.host_capacity:
        _check_whole(parts)
    if parts.copies is not None:
        return Pieces.with_copies(catalog.offsets, parts.copies, chunks)
    if parts.split is not None:
        return Pieces.parts(catalog.offsets, parts.split, chunks)
    nbytes = [layout.nbytes for layout in catalog.layouts]
    return Pieces.whole(catalog.offsets, nbytes, chunks, len(parts.devices))


def _check_whole(parts: Parts) -> None:
    """UsageError for what is computed from one host memory alone."""
    catalog = parts.catalog
    if any(layout.segments for layout in catalog.layouts):
        raise UsageError(
            "experts in segments are computed from one host memory: pack the model without"
            " --segments for GPUs, several devices or a host tier"
        )
    if isinstance(catalog, CopiesCatalog) and catalog.nestings:
        raise UsageError(
            "int8 experts that contain int4 copies are joined in one host memory: pack the model"
            " without --miss-precision for GPUs, several devices or a host tier"
        )
    if parts.thresholds is not None:
        raise UsageError(
            "--miss-precision, --skip-below and --substitute-below are for one CPU's memory: leave"
            " them out with GPUs, several devices or a host tier"
        )


def engine_for(parts: Parts, number: int = 0) -> Engine | None:
    """A GPU, the first one has the dense parts; None where slots are in host memory."""
    return Cuda(parts.devices[number]) if parts.cuda else None


def engines_for(parts: Parts) -> list[Engine]:
    """Every GPU; none where slots are in host memory."""
    found = [engine_for(parts), *(engine_for(parts, i) for i in range(1, len(parts.devices)))]
    return [engine for engine in found if engine is not None]


def lanes_of(parts: Parts) -> tuple[int, ...]:
    """Transfers at a time of each link."""
    if parts.cuda:
        return parts.readers, IN_FLIGHT
    return (parts.readers, 1) if parts.fake else (parts.readers,)


def kernels_of(parts: Parts) -> str:
    """What computes the experts where they are; UsageError where it cannot."""
    if parts.kernels == "auto":
        if not parts.cuda:
            return "numba"
        if find_spec("triton") is not None:
            return ON_GPUS
        log.warning("Triton is not installed (pip install 'greenroom[gpu]'): kernels eager, slower")
        return "eager"
    if parts.cuda and parts.kernels in COMPILED:
        raise UsageError(
            f"--kernels {parts.kernels} computes on a CPU: with --device cuda take triton or eager"
        )
    return parts.kernels


class Greenroom:
    """A model's cache of experts: `model.greenroom`."""

    def __init__(self, model: PreTrainedModel, parts: Parts, store: Store | None = None) -> None:
        """`store` stands in for the checkpoint's own files, such as one in memory."""
        self.parts, self._model = parts, weakref.ref(model)
        self.predictor: Predictor | None
        catalog, policy = parts.catalog, named_policy(parts.policy)
        running = self._predictor(model)
        self._inputs = running.listen() if running else None
        if store is None:
            store = disk = DiskStore(catalog, direct=parts.direct)
            self.direct = disk.direct
            store = checked(disk, catalog)
        else:
            self.direct = True
        if parts.read_limit is not None:
            store = FakeStore(store, bandwidth=parts.read_limit)
        if parts.fake:
            store = FakeStore(store, jitter=0.002, seed=parts.seed)
        self.engines = engines_for(parts)
        self.engine = self.engines[0] if self.engines else None
        chunks = [store.chunks(piece) for piece in range(catalog.experts)]
        if isinstance(catalog, PackCatalog) and parts.split is not None:
            there = set(catalog.pieces)
            bottoms = range(catalog.experts, 2 * catalog.experts)
            chunks += [store.chunks(piece) if piece in there else () for piece in bottoms]
        if isinstance(catalog, CopiesCatalog) and parts.copies is not None:
            chunks += [store.chunks(piece) for piece in catalog.pieces[catalog.experts :]]
        both = self._both()
        self._ahead = slots_ahead(running.shape.top_k) if running else 0
        if both or (parts.thresholds is not None and parts.thresholds.follow):
            self._ahead = slots_ahead(experts_per_token(model))
        pieces = pieces_of(parts, [len(each) for each in chunks])
        slots = self._slots(pieces)
        self._tier = self._host_tier(pieces)
        scheduler = Scheduler(
            pieces,
            parts.capacity,
            policy,
            scope=parts.scope,
            lanes=lanes_of(parts),
            ahead=self._ahead,
            seed=parts.seed,
            host=self._tier,
            thresholds=parts.thresholds,
            rates=Rates(nominal(catalog.slot_bytes), catalog.slot_bytes, pieces.devices)
            if both
            else None,
        )
        between: HostMemory | None = None
        if parts.cuda or self._tier is not None:
            seats, kept = scheduler.queue.seats, parts.host_capacity
            nodes = []
            if self.engines and self._tier is not None:
                each = zip(pieces.shares(kept), self.engines, strict=True)
                nodes = [(share, engine.node) for share, engine in each]
            at = self.engine or Host(), chunks, seats, kept
            stride = catalog.slot_bytes
            between = Slab(*at, stride, nodes) if both else HostMemory(*at, nodes)
        self._slab = between.slots if isinstance(between, Slab) else None
        key = parts.fingerprint if parts.remember else ""
        known = learned.load(key) if key and parts.watch else None
        self._watch = Watch(catalog.offsets, known) if parts.watch else None
        name, self.predictor = "", None
        if running:
            name, self.predictor = next(iter(running.predictors.items()))
        self.driver = Driver(
            scheduler,
            store,
            slots,
            foresight=self._foresight(),
            guard=Guard(parts.seed) if parts.guard and self.predictor else None,
            links=self._links(),
            between=between,
            join=join_of(slots),
        )
        self._recall = Recall(key, self.driver, name, self.predictor)
        self._recall.restore()
        self.warmed = 0  # experts that were read because of earlier runs
        self._close = weakref.finalize(model, self.driver.close)
        self._base = replace(scheduler.counts), self.driver.meter.copy()
        self._tier_base, self._host_base = (0, 0), 0.0
        self.keys_values: KVBytes | None = None  # what those of a request take
        self.growth: Growth | None = None  # of keys and values, where they share the slots' budget
        self._sizes = parts.capacity, parts.capacity  # the least and the most slots there were
        self._pinned: Pinned | None = None
        self._modules: list[nn.Module] = []
        self._request, self._tokens = 0, 0
        self._begin: int | None = None  # prompts that begin with the next pass, where it was said
        self._unnoted = False  # are passes those of a trial?
        self._reading = False  # is the pass a prompt's?
        self._pinned_for = 0  # the request whose prompt says what stays
        self._decoder: nn.Module | None = None  # of an encoder-decoder model
        self._preempting = False  # are routers listened to, after which something else runs?
        self.accelerated: Accelerated | None = None
        self._shared: Shared | None = None
        self._hooks: list[Any] = []
        try:
            self._bind(model, slots)
        except BaseException:
            self.detach()
            raise

    def _both(self) -> bool:
        """Does the host's processor compute too? It is said where it was asked for and cannot."""
        parts = self.parts
        if not parts.co_compute:
            return False
        if not (parts.cuda or parts.fake):
            log.warning("--co-compute auto: there is one processor here, and nothing to choose")
        elif parts.host_capacity < len(parts.devices):
            log.warning(
                "--co-compute auto: host memory has no room for experts, so there is nothing to"
                " compute there; --host-memory says how much it may take"
            )
        elif parts.capacity < parts.catalog.experts:
            return True
        return False

    def _slots(self, pieces: Pieces) -> AnySlots:
        parts, catalog = self.parts, self.parts.catalog
        if parts.split is not None:
            return self._kinds(pieces, parts.split)
        if parts.copies is not None:
            return slots_with_copies(parts, pieces, FakeSlots if parts.fake else HostSlots)
        each: list[HostSlots | DeviceSlots] = []
        for number, share in enumerate(pieces.shares(parts.capacity)):
            if self.engines:
                engine = self.engines[number]
                each.append(DeviceSlots(engine, share, catalog.slot_bytes, catalog.experts))
            else:
                kind = FakeSlots if parts.fake else HostSlots
                each.append(kind(share, catalog.slot_bytes, reserve=catalog.experts))
        if len(each) > 1:
            return SpreadSlots(each, pieces.shares)
        return joining(catalog, each[0]) if isinstance(each[0], HostSlots) else each[0]

    def _kinds(self, pieces: Pieces, split: Split) -> SlotKinds:
        """Slots of tops, of a size for each group, and those of bottoms."""
        parts, offsets = self.parts, pieces.offsets

        def sizes(capacity: int) -> list[int]:
            return [*group_sizes(pieces, capacity, parts.scope), split.seats]

        if parts.scope == "shared":
            tops, most = [max(split.tops)], [offsets[-1]]
        else:
            tops, most = list(split.tops), [b - a for a, b in pairwise(offsets)]
        kind = FakeSlots if parts.fake else HostSlots
        counted = zip(
            sizes(parts.capacity), [*tops, max(split.bottoms)], [*most, split.seats], strict=True
        )
        made = [kind(n, stride, reserve) for n, stride, reserve in counted]
        return SlotKinds(made, parts.capacity, sizes)

    def _links(self) -> tuple[str, ...]:
        """What the links are called; the last one there is for each of several devices."""
        chain = LINKS[: len(lanes_of(self.parts))]
        if len(self.parts.devices) == 1:
            return chain
        name = "cuda" if self.parts.cuda else "fake"
        return (*chain[:-1], *(f"host -> {name}:{number}" for number in self.parts.devices))

    def _host_tier(self, pieces: Pieces) -> HostTier | None:
        """What keeps experts in host memory, where there is room for any."""
        parts = self.parts
        if parts.host_capacity < len(parts.devices):
            return None
        return HostTier(
            pieces, parts.host_capacity, named_policy(parts.host_policy), seed=parts.seed
        )

    def _predictor(self, model: PreTrainedModel) -> Beside | None:
        """What predicts; nothing where all experts have a slot."""
        parts = self.parts
        choice = predictor(parts.prefetch)
        if choice.kind.name == "none" or parts.capacity >= parts.catalog.experts:
            return None
        return foresee(
            model,
            parts.catalog,
            parts.prefetch,
            file=parts.predictor,
            fingerprint=parts.fingerprint,
            seed=parts.seed,
        )

    def _bind(self, model: PreTrainedModel, slots: AnySlots) -> None:
        """Give every experts module what it needs to be served."""
        parts, policy = self.parts, self.driver.scheduler.cache.policy
        self.kernel = kernel(kernels_of(parts))
        self._modules = [model.get_submodule(name) for name in parts.catalog.layers]
        if isinstance(self.kernel, Fused):
            self.accelerated = accelerate(model, reserve, experts_onto, self.kernel.rounded)
        else:
            put_back(model)
        self._shared = shared(model, self._modules)
        first = slots.each[0] if isinstance(slots, SpreadSlots) else slots
        spread = Spread(self.kernel, slots) if isinstance(slots, SpreadSlots) else None
        both = None
        if self._slab is not None:
            both = Both(spread or self.kernel, self.engine or Host(), self._slab)
        kinds = len(slots.kinds) if isinstance(slots, SlotKinds) else 1
        segmented = Segmented(self.kernel, kinds) if parts.catalog.layouts[0].segments else None
        lessened = Lessened(self.kernel, kinds) if parts.thresholds is not None else None
        places = [engine.device for engine in self.engines] or [model.device] * len(parts.devices)
        on_host = isinstance(slots, HostSlots | NestedSlots | SlotKinds)
        computed = None if on_host else slots.computed  # type: ignore[union-attr]
        for layer, module in enumerate(self._modules):
            layout = parts.catalog.layouts[layer]
            experts: LayerExperts
            if segmented is not None:
                experts = self._in_segments(module, layer, slots)
            elif lessened is not None:
                experts = layer_with_less(parts, module, layer, slots)
            else:
                experts = LayerExperts(module, layout, memory_of(first))
            if spread is not None:
                spread.over(experts, places)
            if both is not None:
                both.over(experts)
                if layer == 0:
                    self._calibrate(both, experts, slots)
            binding = Binding(
                self.driver,
                both or spread or segmented or lessened or self.kernel,
                layer,
                experts,
                policy.weighs,
                lessened is not None,
                inputs=partial(self._inputs.latest, layer) if self._inputs else None,
                meanwhile=self._shared.meanwhile[layer],
                computed=computed,
                chosen=self._used if parts.pins is not None or parts.watch else None,
            )
            setattr(module, BINDING, binding)
            if layer == 0:
                self._say_what_is_left(binding)
        passes: list[nn.Module] = [model]
        if model.config.is_encoder_decoder:  # `generate` calls the encoder by itself
            self._decoder = model.get_decoder()
            passes = [model.get_encoder(), self._decoder]
        for module in passes:
            self._hooks += [
                module.register_forward_pre_hook(self._begins, with_kwargs=True),
                module.register_forward_hook(self._ends, always_call=True),
            ]

    def _calibrate(self, both: Both, experts: LayerExperts, slots: AnySlots) -> None:
        """Measure what the scheduler shares misses out by; from there on it sees for itself."""
        rates = self.driver.scheduler.rates
        assert rates is not None
        assert self._slab is not None
        rates.known(calibrate(both, experts, self.engine or Host(), slots, self._slab))

    def _in_segments(self, module: nn.Module, layer: int, slots: AnySlots) -> SegmentedExperts:
        """A layer whose experts lie in segments, all in one slot or in those of two parts."""
        layout, catalog = self.parts.catalog.layouts[layer], self.parts.catalog
        if not isinstance(slots, SlotKinds):
            assert isinstance(slots, HostSlots)
            return SegmentedExperts(module, layout, [slots], 0)
        assert isinstance(catalog, PackCatalog)
        tops = slots.kinds[0 if self.parts.scope == "shared" else layer]
        cut = catalog.cuts[layer]
        of = [tops, slots.kinds[-1]] if cut < len(layout.segments) else [tops]
        return SegmentedExperts(module, layout, of, cut)  # type: ignore[arg-type]

    def _say_what_is_left(self, binding: Binding) -> None:
        """A GPU's kernel leaves some experts to the slower, eager one."""
        if self.kernel.name == ON_GPUS:
            from greenroom.runtime.cuda.kernels import unread

            if (reason := unread(binding.experts)) is not None:
                log.warning("%s: the kernels eager compute them, on the GPU too", reason)

    def _begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A pass begins; one without keys and values before it is the first of a prompt. Of an
        encoder-decoder model that is the encoder's, and the answer's first one goes on with it."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        given = ids if ids is not None else kwargs.get("inputs_embeds")
        if given is None or given.is_meta or self._unnoted:
            return None
        cache = self._cache(model, kwargs)
        batch, length = given.shape[:2]
        together = isinstance(cache, Together)
        if (growth := self.growth) is not None:  # a resize may take it away meanwhile
            if together:
                growth.before_all(cache.caches, cache.lengths)
            else:
                growth.before(cache, batch, length)
            self._sized()
        if self._begin is not None:
            self._request, self._begin = self._request + self._begin, None
        elif model is not self._decoder and (cache is None or not cache.get_seq_length()):
            self._request += 1
        self._reading = prompt = max(cache.lengths) > 1 if together else length > 1
        if self._pinned is not None:
            self._pinned.begins(prompt, anew=self._request != self._pinned_for)
            self._pinned_for = self._request
        self.driver.begin_pass(
            PassBegins(
                self._request,
                self._tokens,
                batch * length,
                prompt,
                None if ids is None else ids.flatten().cpu().numpy(),
            )
        )
        self._tokens += batch * length
        return args, kwargs

    def _cache(self, model: nn.Module, kwargs: dict[str, Any]) -> Any:
        """The keys and values that a pass goes on with: of the kind that was asked for, where it
        begins, and those of the usual kind growing in place."""
        cache, kind = kwargs.get("past_key_values"), self.parts.kv
        if isinstance(cache, Together):
            for each in cache.caches:
                self._adopt(each)
            return cache
        if cache is None and kind.name != DYNAMIC and kwargs.get("use_cache") is not False:
            cache = kwargs["past_key_values"] = kind.cache(model.config)
        self._adopt(cache)
        return cache

    def _adopt(self, cache: Any) -> None:
        adopt(cache, max(self.parts.context, ROOM) + 1, in_blocks=self.engine is not None)

    def begins(self, prompts: int) -> None:
        """So many prompts begin with the next pass; else that is told by keys and values, which a
        prompt may have of an earlier one."""
        self._begin = prompts

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Experts give nothing for the while, nothing is read, and no pass is noted."""
        self._unnoted = True
        try:
            for module in self._modules:
                module.forward = lambda x, *args, **kwargs: torch.zeros_like(x)
            yield
        finally:
            self._unnoted = False
            for module in self._modules:
                del module.forward

    def by_tokens(self) -> bool:
        """Has every layer a way of its own for single tokens, whatever is beside them in a pass?"""
        model: Any = self._model()
        known = 0 if self.accelerated is None else self.accelerated.counts.get("layer", 0)
        bindings: list[Binding] = [getattr(module, BINDING) for module in self._modules]
        return known == model.config.get_text_config().num_hidden_layers and not any(
            binding.experts.unfused for binding in bindings
        )

    def _sized(self) -> None:
        least, most = self._sizes
        self._sizes = min(least, self.capacity), max(most, self.capacity)

    def _ends(self, model: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self._unnoted:
            return
        self.driver.end_pass()
        if (growth := self.growth) is not None:
            growth.seen(getattr(out, "past_key_values", None))
        if self.engine is not None:  # a router's choice is known here when its experts run
            return
        if not self._preempting and self._shared is not None and self._shared.early:
            self._preempting = True
            for layer, router in self._shared.early.items():
                self._hooks.append(router.register_forward_hook(partial(self._chosen, layer)))

    def _chosen(self, layer: int, router: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        """A router has chosen, and something else runs before its experts: they come meanwhile
        (early preemption; ProMoE, 5.2)."""
        chosen = out[2] if isinstance(out, tuple) and len(out) > 2 else None
        if chosen is not None and not chosen.is_meta and not chosen.is_floating_point():
            ids = chosen.unique().cpu().numpy()
            self.driver.decided(layer, ids[ids < self._modules[layer].num_experts])

    @property
    def capacity(self) -> int:
        """Slots that the cache has."""
        return self.driver.scheduler.capacity

    def compile(self) -> None:
        """Have the kernels compiled now, for one token and for many."""
        binding: Binding = getattr(self._modules[0], BINDING)
        experts, slots = [0], [0]
        for tokens in (1, COMPILED_TOKENS):
            device = None if self.engine is None else self.engine.device
            dtype = binding.experts.dtype
            x = torch.zeros(tokens, binding.experts.hidden, dtype=dtype, device=device)
            weights = torch.ones(tokens, 1, dtype=dtype, device=device)
            routing = Routing.of(np.zeros((tokens, 1), np.int64), 1)
            kernel = self.kernel if self.engine or len(self.parts.devices) > 1 else binding.kernel
            step = kernel.begin(binding.experts, x, routing, weights)
            kernel.wave(step, experts, slots)
            kernel.combine(step)
            if self.parts.copies is not None:
                step = kernel.begin(binding.experts, x, routing, weights)
                kernel.wave(step, experts, [1], LOW)  # type: ignore[call-arg]
                kernel.combine(step)

    def _foresight(self) -> Foresight | None:
        """What makes of guesses what the scheduler is told, where anybody guesses."""
        if self.predictor is None:
            return None
        if self._watch is None:
            return Foresight(self.predictor, self.parts.catalog.offsets)
        return Heard(self.predictor, self.parts.catalog.offsets, self._watch.predicted)

    def pin(self) -> None:
        """Have the experts of tasks stay from here on. BudgetError where they leave no room, also
        for the fewest slots that keys and values will leave."""
        parts = self.parts
        if parts.pins is not None:
            fewest = self.growth.least if self.growth is not None else self.capacity
            sizes = group_sizes(pieces_of(parts), fewest, parts.scope)
            for task in parts.pins.tasks.values():
                self.driver.scheduler.cache.check_kept(sizes, task.experts)
            self._pinned = Pinned(parts.pins, self.driver)

    def _used(self, layer: int, experts: Ids) -> None:
        """A layer's router has chosen these experts, [T, K]."""
        if self._pinned is not None:
            self._pinned.chosen(layer, experts)
        if self._watch is not None and not self._reading:
            self._watch.chosen(layer, experts)

    def warm_up(self) -> None:
        """Read what earlier runs left in the cache, before the first prompt; counts stay at 0."""
        scheduler = self.driver.scheduler
        scheduler.on(Resized(self.capacity, ahead=0))  # nothing is to be learned about its pace
        self.warmed = self._recall.warm_up()
        if self.parts.pins is not None and (wanted := self.parts.pins.first).size:
            self.warmed += warm_up(self.driver, wanted, LIMIT_S)
        scheduler.on(Resized(self.capacity, ahead=self._ahead))
        self.reset_stats()

    def stats(self) -> Stats:
        """What happened since the model was loaded, or since `reset_stats`."""
        driver, catalog = self.driver, self.parts.catalog
        counts = minus(driver.scheduler.counts, self._base[0])
        meter = minus(driver.meter.copy(), self._base[1])
        return Stats(
            policy=driver.scheduler.cache.policy.name,
            kernels=described(self.kernel, [getattr(m, BINDING).experts for m in self._modules]),
            capacity=self.capacity,
            capacity_least=self._sizes[0],
            capacity_most=self._sizes[1],
            experts=catalog.experts,
            slot_bytes=catalog.slot_bytes,
            passes=meter.passes,
            expert_requests=counts.requests,
            expert_hits=counts.hits,
            hit_ratio=counts.hits / counts.requests if counts.requests else 0.0,
            bytes_read=meter.bytes_read,
            stall_s=meter.stall_s,
            peak_rss_bytes=peak_rss_bytes(),
            budget_bytes=self.parts.budget_bytes,
            prefetch=prefetch_stats(driver, self.predictor, counts),
            stalls=dict(meter.stalls),
            links=link_stats(driver, meter),
            split=split_stats(driver, counts),
            lesser=lesser_stats(driver, counts, self.parts.precision),
            co_compute=host_stats(driver, counts, driver.host_s - self._host_base),
            host=None if self._tier is None else {
                "capacity": self._tier.capacity,
                "requests": self._tier.requests - self._tier_base[0],
                "hits": self._tier.hits - self._tier_base[1],
            },
        )  # fmt: skip

    def reset_stats(self) -> None:
        """Count from here on; what is resident stays."""
        driver = self.driver
        if self._tier is not None:
            self._tier_base = self._tier.requests, self._tier.hits
        self._base = replace(driver.scheduler.counts), driver.meter.copy()
        self._host_base = driver.host_s
        self._sizes = self.capacity, self.capacity
        driver.scheduler.lookahead.accuracy.reset()

    def timeline(self, on: bool = True) -> Timeline | None:
        """Record what runs when from here on; the timeline so far is returned as recording ends."""
        so_far, self.driver.timeline = self.driver.timeline, Timeline() if on else None
        return self.driver.timeline if on else so_far

    def resize(self, cache: str | int) -> int:
        """Give the cache another size (`25%`, `2GiB`, bytes), also while it is in use.

        Experts that no longer fit go by the policy, and their memory back to the system. From here
        on it has this size, whatever keys and values take. Returns the slots that there are now.
        """
        if not self._close.alive:
            raise ClosedError("the model was detached: load it again")
        slots = slots_for(cache, self.parts.catalog, "cache")
        sizes = group_sizes(pieces_of(self.parts), slots, self.parts.scope)  # or BudgetError
        self.driver.scheduler.cache.check_kept(sizes)
        self.growth = None
        self.driver.resize(slots)
        self._sized()
        return self.capacity

    def grow(self, growth: Growth) -> None:
        """Have as many slots as keys and values leave, from here on."""
        self.driver.resize(growth.first())
        self._sizes = self.capacity, self.capacity
        self.growth = growth
        growth.bind(self.driver)

    def detach(self) -> None:
        """Take out of the model what was put in, end the threads, free the slots.

        The model keeps its dense parts, those that were kept as stored expanded; its experts are
        gone until it is loaded again.
        """
        if self._close.alive:
            self._close()
            counted = self._watch.state(self.driver) if self._watch is not None else None
            self._recall.keep({} if counted is None else {watch.NAME: counted})
        for module in self._modules:
            if hasattr(module, BINDING):
                delattr(module, BINDING)
        for hook in self._hooks:
            hook.remove()
        for part in (self._inputs, self._shared, self.accelerated):
            if part is not None:
                part.detach()
        model: Any = self._model()
        if model is not None and getattr(model, "greenroom", None) is self:
            del model.greenroom
