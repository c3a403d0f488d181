"""What an eviction policy is: a few compiled functions over arrays of its own.

A policy is told of prompts, steps, hits, inserts and evictions, and names a victim among the
residents that are not pinned. It never counts, moves or reads a clock: `Now` says what time it is.
Its functions are `compiled`, so that the cache and the simulator can bind them into one loop;
what it remembers is a NamedTuple of arrays, made by its `memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from greenroom.core.pieces import Ints
from greenroom.core.stream import Stream
from greenroom.errors import UnknownName, UsageError

Floats = NDArray[np.float64]
Rows = NDArray[np.int32]
Weights = NDArray[np.float32]
Ids = NDArray[np.integer[Any]]

# Called by compiled code only: without a wrapper for Python each takes a third less to compile.
# Inlined: a call would pass every array of the state, seven words each.
INLINED: dict[str, Any] = {
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "forceinline": True,
    "_nrt": False,
}
compiled = njit(**INLINED)

NO_ROWS: Rows = np.empty(0, np.int32)
NO_WEIGHTS: Weights = np.empty(0, np.float32)


class State(NamedTuple):
    """The cache's arrays. P pieces, S slots, G groups (budgets that do not share slots)."""

    slot_of: Ints  # [P] slot of a resident or arriving piece, else -1
    piece_in: Ints  # [S] piece that has the slot, else -1
    pinned: Ints  # [P] > 0 where the piece must not be evicted
    group_of: Ints  # [P] group that the piece belongs to
    free: Ints  # [S] stack of free slots of each group, group g's from first[g]
    first: Ints  # [G + 1] slots first[g] .. first[g + 1] belong to group g
    free_count: Ints  # [G] free slots of each group


class Now(NamedTuple):
    """When something happens. All but `index` are the same for the requests of a step."""

    clock: int  # logical time: pass or token * layers + layer; the request's index in `rounds`
    token: int  # the token, or the pass where a step is a pass at a layer
    request: int  # the prompt-and-answer
    layer: int
    # Requests (experts asked for) since the start, this one not counted.
    index: int  # type: ignore[assignment]


@dataclass(frozen=True)
class Option:
    """A setting of a policy: `name=value` after its name. Its type is that of the default."""

    name: str
    default: int | float | str
    help: str
    least: float = float("-inf")
    most: float = float("inf")
    choices: tuple[str, ...] = ()

    def parse(self, policy: str, text: str) -> int | float | str:
        """The value that a text stands for. UsageError says what would be right."""
        if self.choices and text not in self.choices:
            raise UnknownName(f"{self.name} of {policy}", text, self.choices)
        try:
            value = type(self.default)(text)
        except ValueError:
            kind = "a whole number" if isinstance(self.default, int) else "a number"
            raise UsageError(f"{self.name} of {policy} must be {kind}: {text!r}") from None
        if not isinstance(value, str) and not self.least <= value <= self.most:
            bounds = f"at least {self.least:g}"
            if self.most != float("inf"):
                bounds = f"between {self.least:g} and {self.most:g}"
            raise UsageError(f"{self.name} of {policy} must be {bounds}: {text}")
        return value


@dataclass(frozen=True)
class Setup:
    """What a policy may know before the first request."""

    layer: Ints  # [P] the layer of each piece
    group_of: Ints  # [P] the group of each piece
    sizes: tuple[int, ...]  # slots of each group at the start
    layers: int
    seed: int
    options: Mapping[str, Any]
    trace: Stream | None  # the whole trace, for those that need it

    @property
    def pieces(self) -> int:
        return self.layer.size

    @property
    def groups(self) -> int:
        return len(self.sizes)

    @property
    def known(self) -> Stream:
        """The whole trace, for policies that are marked as needing it."""
        assert self.trace is not None
        return self.trace


@compiled
def ignore(state: State, own: Any, piece: int, now: Now) -> None:
    """What a policy does about hits, inserts or evictions that it does not care for."""


@compiled
def ignore_request(state: State, own: Any, now: Now) -> None:
    """What a policy does about a new prompt that it does not care for."""


@compiled
def ignore_step(
    state: State, own: Any, pieces: Ids, rows: Rows, weights: Weights, now: Now
) -> None:
    """What a policy does about a step that it does not care for."""


@dataclass(frozen=True)
class Policy:
    """A policy by name, and its functions. `own` is what `memory` made; all are `compiled`.

    `victim(state, own, group, piece, now)` returns a resident piece of the group that is not
    pinned, or -1; `piece` is the one that needs the room, -1 where the cache shrinks.
    `on_hit`, `on_insert` and `on_evict(state, own, piece, now)` follow a request that was a hit,
    one that was a miss and has its slot, and precede the loss of a slot.
    `on_step(state, own, pieces, rows, weights, now)` precedes the requests of a step: `rows` are
    the tokens that chose each piece (empty: one each), `weights` the sums of their gate weights
    (empty: not known). `on_request(state, own, now)` precedes the first step of a prompt.

    A policy that `weighs` looks at rows and weights; others need not be told of them. One that
    `needs_trace` cannot run where the future is not known. One with a `preload`
    starts with those pieces resident and takes in no others: they pass through scratch slots.
    """

    name: str
    memory: Callable[[Setup], Any]
    victim: Any
    on_hit: Any = ignore
    on_insert: Any = ignore
    on_evict: Any = ignore
    on_step: Any = ignore_step
    on_request: Any = ignore_request
    options: tuple[Option, ...] = ()
    values: Mapping[str, int | float | str] = field(default_factory=dict)
    needs_trace: bool = False
    weighs: bool = False
    preload: Callable[[Setup], Ints] | None = None

    def check_online(self) -> None:
        """UsageError where the policy needs to know the future."""
        if self.needs_trace:
            raise UsageError(
                f"policy {self.name} must know the whole trace beforehand:"
                " it runs in `greenroom simulate` only"
            )

    @property
    def settings(self) -> dict[str, int | float | str]:
        """Every option's value, given or default."""
        return {o.name: self.values.get(o.name, o.default) for o in self.options}

    def configured(self, text: str) -> Policy:
        """This policy with `name=value[,name=value...]`. UsageError where one cannot be right."""
        known = {o.name: o for o in self.options}
        values: dict[str, int | float | str] = {}
        for item in text.split(","):
            name, equals, value = item.partition("=")
            if not known:
                raise UsageError(f"policy {self.name} has no options: {text!r}")
            if name not in known:
                raise UnknownName(f"option of {self.name}", name, known)
            if not equals or name in values:
                raise UsageError(f"options of {self.name} are given once, as name=value: {item!r}")
            values[name] = known[name].parse(self.name, value)
        return replace(self, name=f"{self.name}:{text}", values=values)

    def setup(
        self,
        layer: Ints,
        group_of: Ints,
        sizes: tuple[int, ...],
        layers: int,
        seed: int,
        trace: Stream | None,
    ) -> Setup:
        """What its memory is made from. UsageError where it needs a trace and there is none."""
        if trace is None:
            self.check_online()
        return Setup(layer, group_of, sizes, layers, seed, self.settings, trace)
