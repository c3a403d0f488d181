"""Slots make room for keys and values as these grow, and take it back when they are gone.

Before a pass it is known how many tokens of context it will have. What they need is taken from the
slots a block of tokens at a time, before the pass begins; so the memory is inside the budget all
the time, and a conversation costs a resize every BLOCK tokens. When a prompt has been read, or
another begins, slots come back where that is worth a resize.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from greenroom.core.layout import Catalog
from greenroom.errors import DeviceError
from greenroom.hf.kv import cache as kv
from greenroom.hf.kv.sizes import KVBytes
from greenroom.hf.memory.budget import PREFILL_BLOCK, SLACK, Needs, Workspace, capacity_for
from greenroom.runtime.driver.driver import Driver

BLOCK = kv.BLOCK  # tokens that room is made for at a time
WORTH = 32  # a share of the slots: so many must be gained at least, for slots to come back

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a pass asks for: sequences, new tokens of each, and all its tokens."""

    batch: int
    length: int
    tokens: int


class Growth:
    """How many slots a budget leaves to the passes of one model.

    `need` is what is there for good; what passes need comes on top of it. `of` is what the budget
    is of, where that is not the process; `release` gives unused memory back to it.
    """

    def __init__(
        self,
        budget: int,
        need: Needs,
        catalog: Catalog,
        keys_values: KVBytes,
        workspace: Workspace,
        *,
        context: int,
        least: int,
        of: str = "",
        devices: int = 1,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`least` slots must be left with a full `context`: BudgetError says what would do."""
        self.budget, self._need, self._catalog, self._of = budget, need, catalog, of
        self._devices = devices
        self._kv, self._workspace = keys_values, workspace
        self._context, self._fewest, self._release = context, least, release
        self._driver: Driver | None = None
        self._lock = threading.Lock()
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()  # that were seen and live
        self._last: weakref.ref[Any] | None = None
        self._known = Demand(0, 0, 0)  # what there is room for
        self._known_together: tuple[Any, ...] | None = None  # the same of several sequences
        self._asked = 0  # bytes that the last resize made room for
        self.least = self._capacity(self._full(), 0)

    def _full(self) -> Demand:
        """The end of the longest prompt."""
        return Demand(1, min(self._context, PREFILL_BLOCK), self._context)

    def first(self) -> int:
        """Slots to begin with: what the first block of a prompt leaves."""
        length = self._full().length
        return self._capacity(Demand(1, length, length), 0)

    def in_decode(self) -> int:
        """Slots while single tokens follow a short prompt."""
        return self._capacity(Demand(1, 1, min(BLOCK, self._context)), 0)

    def leaving(self, slots: int) -> Growth:
        """The same with the budget that leaves so many slots when the context is full."""
        need = self._needs(self._full(), 0)
        budget = need.total + -(-slots // self._devices) * self._catalog.slot_bytes
        return Growth(
            budget, self._need, self._catalog, self._kv, self._workspace,
            context=self._context, least=self._fewest, of=self._of,
            devices=self._devices, release=self._release,
        )  # fmt: skip

    def bind(self, driver: Driver) -> None:
        """From here on, resize its slots."""
        self._driver = driver
        length = self._full().length
        self._asked = self._needs(Demand(1, length, length), 0).total

    def before(self, cache: Any, batch: int, length: int) -> None:
        """A pass of `length` tokens a sequence follows those in `cache`, if there is one.

        BudgetError, before anything is changed, where not even the fewest slots leave room.
        """
        had = _tokens(cache)
        demand = Demand(batch, length, had + length)
        if self._driver is None or self._covered(cache, demand):
            return
        with self._lock:
            self._make_room(self._driver, cache, demand, had)

    def before_all(self, caches: Sequence[Any], lengths: Sequence[int]) -> None:
        """As `before`, for a pass of several sequences: so many new tokens of each."""
        after = [_tokens(cache) + new for cache, new in zip(caches, lengths, strict=True)]
        blocks = tuple(-(-tokens // BLOCK) * BLOCK for tokens in after)
        known = tuple(map(id, caches)), blocks, -(-sum(lengths) // BLOCK)
        if self._driver is None or known == self._known_together:
            return
        with self._lock:
            held = sum(self._kv.held(tokens) for tokens in blocks)
            passing = max(self._kv.passing(tokens) for tokens in blocks)
            workspace = self._workspace.nbytes(1, sum(lengths), max(after))
            keys_values = held + passing + self._others(caches)
            self._settle_for(self._driver, self._with(keys_values, workspace))
            for cache, tokens in zip(caches, blocks, strict=True):
                if self._kv.on_a_gpu and _tokens(cache):
                    kv.make_room(cache, tokens, self._release)
                self.seen(cache)
            self._known, self._known_together = Demand(0, 0, 0), known

    def reserve(self, nbytes: int) -> None:
        """Make room for so many bytes of keys and values beside those that there are."""
        if self._driver is None:
            return
        with self._lock:
            full = self._full()
            workspace = self._workspace.nbytes(1, full.length, full.tokens)
            self._settle_for(self._driver, self._with(self._others(()) + nbytes, workspace))
            self._known, self._known_together = Demand(0, 0, 0), None

    def most(self) -> int:
        """Bytes that keys and values can have where the fewest slots are left."""
        full = self._full()
        workspace = self._workspace.nbytes(1, full.length, full.tokens)
        slots = -(-self._fewest // self._devices) * self._catalog.slot_bytes
        return max(0, self.budget - self._with(0, workspace).total - slots)

    def _others(self, caches: Sequence[Any]) -> int:
        """Bytes of the caches that live, but for these."""
        given = {id(cache) for cache in caches}
        return sum(kv.held(each) for each in list(self._caches) if id(each) not in given)

    def _with(self, keys_values: int, workspace: int) -> Needs:
        return replace(self._need, kv_cache=keys_values, workspace=workspace + SLACK)

    def _make_room(self, driver: Driver, cache: Any, demand: Demand, had: int) -> None:
        others = self._others((cache,))
        if had:  # a cache of a kind that takes more than ours do
            others += max(0, kv.held(cache) - self._kv.held(demand.tokens, demand.batch))
        rounded = replace(demand, tokens=-(-demand.tokens // BLOCK) * BLOCK)
        if rounded.tokens > self._context >= demand.tokens:
            rounded = replace(demand, tokens=self._context)
        self._settle(driver, rounded, others)
        if had and self._kv.on_a_gpu:
            kv.make_room(cache, rounded.tokens, self._release)
        if cache is not None:
            self.seen(cache)
        self._known, self._known_together = rounded, None

    def seen(self, cache: Any) -> None:
        """A cache that a pass was given, or has made."""
        if cache is not None:
            self._caches.add(cache)
            self._last = weakref.ref(cache)

    def _covered(self, cache: Any, demand: Demand) -> bool:
        """Is there room already, as after nearly every token?"""
        last, known = self._last() if self._last else None, self._known
        return (
            cache is not None
            and cache is last
            and (demand.batch, demand.length) == (known.batch, known.length)
            and demand.tokens <= known.tokens
        )

    def _settle(self, driver: Driver, demand: Demand, others: int) -> None:
        """Have the slots that a demand leaves, beside the bytes of other caches."""
        self._settle_for(driver, self._needs(demand, others))

    def _settle_for(self, driver: Driver, need: Needs) -> None:
        """Have the slots that needs leave."""
        wanted, now = self._slots(need), driver.scheduler.capacity
        asked = need.total
        if wanted < now:
            if (fitting := driver.slots.fitting(wanted)) < now:
                driver.resize(fitting)
                self._release()
            self._asked = asked
        elif (wanted - now) * WORTH >= now and asked + self._worth(now) <= self._asked:
            try:
                driver.resize(wanted)
            except DeviceError as error:
                log.warning("slots do not come back: %s", error)
            self._asked = asked

    def _worth(self, now: int) -> int:
        """Bytes by which less must be needed than at the last resize: segments are not had in
        parts, and what was given up for one block of tokens must not come back with the next."""
        return max(1, now // WORTH) * self._catalog.slot_bytes

    def _needs(self, demand: Demand, others: int) -> Needs:
        keys_values = self._kv.total(demand.tokens, demand.batch) + others
        workspace = self._workspace.nbytes(demand.batch, demand.length, demand.tokens)
        return self._with(keys_values, workspace)

    def _capacity(self, demand: Demand, others: int) -> int:
        return self._slots(self._needs(demand, others))

    def _slots(self, need: Needs) -> int:
        fewest, of = self._fewest, self._of
        return capacity_for(self.budget, need, self._catalog, fewest, of, self._devices)


def _tokens(cache: Any) -> int:
    """Tokens in a cache; those with no layer that counts them have one state for all."""
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except ValueError:
        return 0
