"""The interface of eviction policies: compiled functions over a state of arrays.

A policy observes prompts, steps, hits, inserts and evictions, and chooses a victim among the
residents that are not pinned. It does not count requests or read a clock: each call passes a
`LogicalTime`. Its functions are `compiled`, so that the cache and the simulator can compile them
into one loop. Its state is a NamedTuple of arrays, which `build_state` makes. A piece is what has a
slot: an unsplit expert, or the top segment of a split one.
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
Arrays = Mapping[str, NDArray[Any]]

# Only compiled code calls these functions: without Python wrappers they compile in a third less
# time. They are inlined, since a call would pass every array of the states, seven values each.
INLINED: dict[str, Any] = {
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "forceinline": True,
    "_nrt": False,
}
compiled = njit(**INLINED)
"""Decorator of a policy's functions: compiled by Numba, and callable by compiled code alone."""

NO_ROWS: Rows = np.empty(0, np.int32)
NO_WEIGHTS: Weights = np.empty(0, np.float32)


class CacheState(NamedTuple):
    """The arrays of a cache that an eviction policy reads: pieces, slots, slot groups.

    A slot group is a set of slots under one budget: those of all layers, of one layer, or of a
    device. There are P pieces (unsplit experts, segments or copies), S slots and G slot groups.
    """

    slot_of: Ints  # [P] slot of a resident or arriving piece, else -1
    piece_in: Ints  # [S] piece that has the slot, else -1
    pinned: Ints  # [P] > 0 where the piece must not be evicted
    group_of: Ints  # [P] group that the piece belongs to
    free: Ints  # [S] stack of free slots of each group, group g's from first[g]
    first: Ints  # [G + 1] slots first[g] .. first[g + 1] belong to group g
    free_count: Ints  # [G] free slots of each group


class LogicalTime(NamedTuple):
    """The logical time of a cache request, which an eviction policy reads.

    A request is one expert of one step (one layer of a pass). All fields but `index` are equal for
    the requests of a step.
    """

    clock: int  # pass or token * layers + layer; in the order `rounds` the request's index
    token: int  # the token, or the pass where a step is a pass at a layer
    request: int  # the prompt and its answer
    layer: int
    prefill: int  # 1 where the pass reads (a block of) a prompt, else 0
    # Requests (one expert of one step each) since the start, without this one.
    index: int  # type: ignore[assignment]


@dataclass(frozen=True)
class PolicyOption:
    """An option of an eviction policy or a predictor, which users give as `name=value`.

    Its values have the type of `default`. Numbers are from `least` to `most`; if there are
    `choices`, the value is one of them.
    """

    name: str
    default: int | float | str
    help: str
    least: float = float("-inf")
    most: float = float("inf")
    choices: tuple[str, ...] = ()

    def parse(self, policy: str, text: str) -> int | float | str:
        """Parse and check the value of a policy's or predictor's option.

        `policy` is the name of the policy or predictor, for the messages. UnknownName or UsageError
        says which values are valid.
        """
        if self.choices and text not in self.choices:
            raise UnknownName(f"{self.name} of {policy}", text, self.choices)
        try:
            value = type(self.default)(text)
        except ValueError:
            kind = "a whole number" if isinstance(self.default, int) else "a number"
            raise UsageError(
                f"option {self.name} of {policy} must be {kind}, got {text!r}"
            ) from None
        if not isinstance(value, str) and not self.least <= value <= self.most:
            bounds = f"at least {self.least:g}"
            if self.most != float("inf"):
                bounds = f"between {self.least:g} and {self.most:g}"
            raise UsageError(f"option {self.name} of {policy} must be {bounds}, got {text}")
        return value


@dataclass(frozen=True)
class PolicySetup:
    """Facts of model, slots and trace, from which an eviction policy builds its state.

    A slot group is a set of slots under one budget: those of all layers, of one layer, or of a
    device. There are P pieces (unsplit experts, segments or copies).
    """

    layer: Ints  # [P] the layer of each piece
    group_of: Ints  # [P] the group of each piece
    sizes: tuple[int, ...]  # slots of each group at the start
    layers: int
    seed: int
    options: Mapping[str, Any]
    trace: Stream | None  # the complete trace, for policies with `needs_trace`

    @property
    def pieces(self) -> int:
        """Return the number of pieces: unsplit experts, or segments or copies of experts."""
        return self.layer.size

    @property
    def groups(self) -> int:
        """Return the number of slot groups of the cache."""
        return len(self.sizes)

    @property
    def required_trace(self) -> Stream:
        """Return the complete trace, for eviction policies with `needs_trace`."""
        assert self.trace is not None
        return self.trace


@compiled
def ignore(cache: CacheState, state: Any, piece: int, now: LogicalTime) -> None:
    """Ignore hits, insertions or evictions: the default handler of an eviction policy."""


@compiled
def ignore_request(cache: CacheState, state: Any, now: LogicalTime) -> None:
    """Ignore the start of a prompt: the default handler of an eviction policy."""


@compiled
def ignore_step(
    cache: CacheState, state: Any, pieces: Ids, rows: Rows, weights: Weights, now: LogicalTime
) -> None:
    """Ignore the start of a layer's step: the default handler of an eviction policy."""


class Learning(NamedTuple):
    """Functions by which later runs get what an eviction policy has learned, in plain Python.

    version: the version of the arrays; arrays of another version are not restored
    export:  returns copies of the arrays that a policy's state has learned
    restore: puts these arrays into a new state. ValueError, before anything changes, if they do not
             fit the model. The options of the policy may differ from those of the earlier run

    Cache contents and logical times are not learned.
    """

    version: int
    export: Callable[[Any], Arrays]
    restore: Callable[[Any, Arrays], None]


@dataclass(frozen=True)
class Policy:
    """An eviction policy: its name, its compiled functions and its options.

    A piece is an unsplit expert, or the top segment of a split one. In the functions `state` is
    what `build_state` made, `cache` the `CacheState`, `now` the `LogicalTime`.

    victim(cache, state, group, piece, now): returns a resident piece of the slot group that is not
        pinned, or -1; `piece` is the one that needs the slot, -1 if the cache shrinks
    on_hit(cache, state, piece, now): called when the requested piece has a slot
    on_insert(cache, state, piece, now): called when a requested piece without a slot has got one
    on_evict(cache, state, piece, now): called before a piece loses its slot
    on_step(cache, state, pieces, rows, weights, now): called before the requests of a step; `rows`
        are the tokens that chose each piece (empty: one each), `weights` the sums of their gate
        weights (empty: unknown)
    on_request(cache, state, now): called before the first step of a prompt
    weighs: the policy reads rows and weights; other policies may get empty ones
    needs_trace: the policy must know which experts will be used, and runs in simulations only
    preload: returns the pieces that are resident from the start; no other piece is inserted then
    learning: exports and restores what the policy learns for later runs; None: nothing
    """

    name: str
    build_state: Callable[[PolicySetup], Any]
    victim: Any
    on_hit: Any = ignore
    on_insert: Any = ignore
    on_evict: Any = ignore
    on_step: Any = ignore_step
    on_request: Any = ignore_request
    options: tuple[PolicyOption, ...] = ()
    values: Mapping[str, int | float | str] = field(default_factory=dict)
    needs_trace: bool = False
    weighs: bool = False
    preload: Callable[[PolicySetup], Ints] | None = None
    learning: Learning | None = None

    def check_online(self) -> None:
        """Check that an eviction policy can run online, without knowing which experts come next.

        UsageError if it cannot.
        """
        if self.needs_trace:
            raise UsageError(
                f"policy {self.name} must know the whole trace beforehand:"
                " it runs in `greenroom simulate` only"
            )

    @property
    def settings(self) -> dict[str, int | float | str]:
        """Return the value of every option of an eviction policy, configured or default."""
        return {o.name: self.values.get(o.name, o.default) for o in self.options}

    def with_options(self, text: str) -> Policy:
        """Copy an eviction policy with other option values.

        `text` is `name=value[,name=value...]`. UsageError or UnknownName says what is wrong in it.
        """
        options = {o.name: o for o in self.options}
        values: dict[str, int | float | str] = {}
        for item in text.split(","):
            name, equals, value = item.partition("=")
            if not options:
                raise UsageError(f"policy {self.name} has no options: {text!r}")
            if name not in options:
                raise UnknownName(f"option of {self.name}", name, options)
            if not equals or name in values:
                raise UsageError(f"options of {self.name} are given once, as name=value: {item!r}")
            values[name] = options[name].parse(self.name, value)
        return replace(self, name=f"{self.name}:{text}", values=values)

    def export_learned(self, state: Any) -> Arrays:
        """Export what an eviction policy's state has learned; empty if it learns nothing."""
        if self.learning is None:
            return {}
        return {"version": np.array(self.learning.version), **self.learning.export(state)}

    def restore_learned(self, state: Any, arrays: Arrays) -> None:
        """Restore what an eviction policy has learned in an earlier run.

        ValueError if the arrays are of another version or do not fit the model.
        """
        if self.learning is None:
            raise ValueError(f"policy {self.name} stores nothing for later runs")
        version = arrays.get("version")
        if version is None or version.shape != () or version != self.learning.version:
            text = "no version" if version is None else f"version {version}"
            raise ValueError(
                f"the stored arrays of policy {self.name} have {text}, but must have version"
                f" {self.learning.version}"
            )
        self.learning.restore(state, arrays)

    def setup(
        self,
        layer: Ints,
        group_of: Ints,
        sizes: tuple[int, ...],
        layers: int,
        seed: int,
        trace: Stream | None,
    ) -> PolicySetup:
        """Collect what an eviction policy needs to build its initial state.

        A piece is an unsplit expert, or a segment or copy of one.

        layer:    the layer of each piece, [pieces]
        group_of: the slot group of each piece, [pieces]
        sizes:    the slots of each slot group
        trace:    the complete trace, or None

        The result is the argument of `build_state`. UsageError if the policy needs a trace and has
        none.
        """
        if trace is None:
            self.check_online()
        return PolicySetup(layer, group_of, sizes, layers, seed, self.settings, trace)
