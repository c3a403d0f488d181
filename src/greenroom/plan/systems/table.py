"""Table of published systems: each combines Greenroom's parts as its paper describes.

A system has an eviction policy, a division of slots among layers, a predictor, and further parts.
Its `reading` says how Greenroom reads the paper, and where they differ. All systems share
Greenroom's transfer queue (demands first, in chunks, wrong prefetches of a layer dropped), its
groups of experts and its streaming of prompts. So systems differ only in their decisions. They
prefetch every predicted expert that is not resident. `NAME+greenroom` is the same system with
Greenroom's own rule for that: what is expected to save time, and only while answers are faster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from greenroom.config import SCOPES
from greenroom.core.config.base import ALL, TOP_K, VALUE
from greenroom.errors import UnknownName, UsageError

GREENROOM = "+greenroom"  # ends the name of a system with our value rule and guard
APPROXIMATION_OPTIONS = ("miss_precision", "low_below", "low_share", "low_follow")


@dataclass(frozen=True, slots=True)
class System:
    """Published system for MoE inference, as a combination of Greenroom's parts.

    name:        name of the system on the command line
    source:      the paper
    reading:     how Greenroom reads the paper, and where they differ
    policy:      eviction policy
    scope:       division of cache slots: shared by all layers, or per-layer
    prefetch:    predictor of experts, `NAME[:distance]`, or off
    rule:        which predicted experts are prefetched: value, top-k or all
    distance:    how many layers ahead a trained predictor predicts, if `prefetch` does not say it
    guard:       whether to prefetch only while that is faster
    sizes:       how each layer's slots are found: `dp` (a dynamic programme), `configurator`
                 (MoEpic's Algorithm 1, which also splits experts), or None if `scope` is enough
    split:       whether a top segment of each expert is cached and the rest fetched
    preselected: whether the resident experts are chosen before the run, by counts
    precision:   precision of the copies that serve misses, which changes the output; None for none
    co_compute:  whether the host's processor may compute a miss
    """

    name: str
    source: str
    reading: str
    policy: str = "lru"
    scope: str = "shared"
    prefetch: str = "off"
    rule: str = TOP_K
    distance: int = 1
    guard: bool = False
    sizes: str | None = None
    split: bool = False
    preselected: bool = False
    precision: str | None = None
    co_compute: bool = False

    def settings(self) -> dict[str, Any]:
        """Return a system's options of a run for policy, scope and prefetching."""
        return {
            "policy": self.policy,
            "scope": self.scope,
            "prefetch": self.prefetch,
            "no_guard": self.prefetch != "off" and not self.guard,
            "prefetch_rule": VALUE if self.prefetch == "off" else self.rule,
        }

    def with_greenroom(self) -> System:
        """Return a published system with Greenroom's value rule and guard for prefetching.

        UsageError for a system that prefetches nothing, or has this rule and guard already.
        """
        if self.prefetch == "off" or self.guard:
            why = "has them already" if self.guard else "prefetches nothing"
            raise UsageError(
                f"{GREENROOM} adds Greenroom's value rule and guard of prefetching, but system"
                f" {self.name} {why}: give {self.name}"
            )
        reading = f"{self.reading}; with Greenroom's value rule and guard"
        name = self.name + GREENROOM
        return replace(self, name=name, reading=reading, rule=VALUE, guard=True)

    def parts(self) -> dict[str, str]:
        """Describe the further parts of a published system, by the option that enables each.

        Further parts are all but the policy, a named scope, and prefetching.
        """
        parts = {}
        if self.sizes == "dp":
            parts["scope"] = "the slots of each layer, as a FILE of `greenroom trace budgets`"
        if self.split:
            parts["split"] = "split experts, and slots of each layer, by MoEpic's Algorithm 1"
        if self.preselected:
            parts["pin"] = "experts chosen before the run, as a FILE of `greenroom trace hot`"
        if self.precision is not None:
            parts["miss_precision"] = f"misses in {self.precision}, which change the output"
        if self.co_compute:
            parts["co_compute"] = "misses computed by the host's processor"
        return parts

    def calibrated_options(self) -> tuple[str, ...]:
        """List the options of a published system that a benchmark sets from recorded routing."""
        sized = ("scope",) if self.sizes is not None else ()
        return (*sized, *("split",) * self.split, *("pin",) * self.preselected)

    def select_options(self, user_options: Mapping[str, Any]) -> dict[str, Any]:
        """Select the user's options that apply to this one of several compared systems.

        An option that enables or sets a part applies only to systems with that part; all other
        options apply to every system. A system that splits experts takes sizes of layers (`scope`)
        only together with `split`.
        """
        has = {*self.parts()}
        if self.split and "split" in user_options:
            has.add("scope")
        if (user_options.get("prefetch") or self.prefetch) in ("learned", "auto"):
            has.add("predictor")
        parts = {option: part_of(option, value) for option, value in user_options.items()}
        return {
            o: value for o, value in user_options.items() if parts[o] is None or parts[o] in has
        }


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(
            "mixtral-offloading",
            "Eliseev and Mazur, 2023: Fast Inference of Mixture-of-Experts Language Models with"
            " Offloading",
            "an LRU cache of equal size for each layer; the next layer's gate, applied to this"
            " layer's hidden states, predicts what to prefetch while this layer is computed."
            " For the"
            " paper's mixed quantisation, use a quantised checkpoint",
            scope="per-layer",
            prefetch="next-gate:1",
        ),
        System(
            "adapmoe",
            "Zhong et al., 2024: AdapMoE, as MoEpic cites it",
            "LRU, with the size of each layer's cache by a dynamic programme; the next layer's gate"
            " predicts what to prefetch. The paper's adaptive gating changes the output, and is not"
            " included",
            prefetch="next-gate:1",
            sizes="dp",
        ),
        System(
            "moe-infinity",
            "Xue et al., 2024: MoE-Infinity",
            "evicts by the activation matrices of the most similar earlier requests, and"
            " prefetches the experts that these requests used in later layers",
            policy="moe-infinity",
            prefetch="eamc",
        ),
        System(
            "promoe",
            "Song et al., 2024: ProMoE",
            "LRU, as in the paper's baseline with all other parts; a trained predictor for each"
            " layer, four layers ahead (train it with --distance 4; the paper's evaluation names no"
            " distance). Every system here has the paper's chunks, early preemption and reordered"
            " inference",
            prefetch="learned",
            distance=4,
        ),
        System(
            "moepic",
            "Yan et al., 2025: MoEpic",
            "LCP eviction; slots of layers and split ratios by Algorithm 1; the next layer's gate"
            " ranks all experts, which are prefetched in this order: the bottom segments of"
            " resident experts, and other experts entirely",
            policy="lcp",
            scope="per-layer",
            prefetch="next-gate:1,width=all",
            rule=ALL,
            sizes="configurator",
            split=True,
        ),
        System(
            "pre-gated",
            "Hwang et al., 2024: Pre-gated MoE",
            "gates that were trained to choose experts a layer ahead, so that prefetches are never"
            " wrong; LRU eviction. The gates of a model without that training only guess. A"
            " simulation plays the trace's routing as theirs",
            prefetch="pregated",
        ),
        System(
            "expertflow",
            "He et al., 2024: ExpertFlow (abstract)",
            "LRU; a predictor of a token's whole routing path before it is computed, corrected"
            " while its layers pass. The abstract names no eviction; its scheduling of tokens into"
            " batches is not included",
            prefetch="routing-path",
        ),
        System(
            "hobbit",
            "Tang et al., 2024: HOBBIT",
            "evicts by the paper's combined score (docs/policies.md); the next layer's gate"
            " predicts"
            " what to prefetch; misses with a low gate weight are served from int4 copies",
            policy="hobbit",
            prefetch="next-gate:1",
            precision="int4",
        ),
        System(
            "fate",
            "Fang et al., 2025: Fate",
            "eviction that favours shallow layers; the next layer's gate predicts what to prefetch."
            " For the paper's hybrid quantisation, use a quantised checkpoint",
            policy="fate",
            prefetch="next-gate:1",
        ),
        System(
            "hybrimoe",
            "Zhong et al., 2025: HybriMoE",
            "evicts by scores of the gate; the next layer's gate predicts what to prefetch; GPU and"
            " host share the misses, each miss going to the one that finishes it first",
            policy="hybrimoe",
            prefetch="next-gate:1",
            co_compute=True,
        ),
        System(
            "fiddler",
            "Kamahori et al., 2024: Fiddler",
            "the most popular experts stay in the cache; the host computes others whenever that is"
            " faster than moving them to the GPU",
            policy="static",
            preselected=True,
            co_compute=True,
        ),
        System(
            "llru",
            "Layered paging (LLRU)",
            "the paper's eviction policy alone, as the paper measures it",
            policy="llru",
        ),
        System(
            "static",
            "the baseline of ProMoE, section 7.1",
            "the most popular experts stay in the cache, others pass through scratch slots",
            policy="static",
            preselected=True,
        ),
        System(
            "greenroom",
            "ours",
            "next-use eviction, and prefetching only while that is faster",
            policy="auto",
            prefetch="auto",
            rule=VALUE,
            guard=True,
        ),
    )
}


def system(name: str) -> System:
    """Return the published system of a given name, or of NAME+greenroom.

    UnknownName if there is none; UsageError if Greenroom's rules change nothing in it.
    """
    row = SYSTEMS.get(name.removesuffix(GREENROOM))
    if row is None:
        raise UnknownName("system", name, SYSTEMS)
    return row.with_greenroom() if name.endswith(GREENROOM) else row


def systems(text: str) -> list[System]:
    """Parse comma-separated names into published systems, each once.

    UnknownName for a name that does not exist.
    """
    return [system(name) for name in dict.fromkeys(part.strip() for part in text.split(","))]


def part_of(option: str, value: Any) -> str | None:
    """Return the option that enables the part of a system to which an option belongs.

    None for options that apply to every system.
    """
    if option in APPROXIMATION_OPTIONS:
        return APPROXIMATION_OPTIONS[0]
    if option == "scope":  # a name is an option of every row; sizes of layers are a part
        return None if value in SCOPES else option
    if option == "tau":  # how often the slots of split experts are divided anew
        return "split"
    return option if option in ("pin", "split", "co_compute", "predictor") else None


def check_parts(rows: Sequence[System], user_options: Mapping[str, Any]) -> None:
    """Check that every user option applies to one of the given systems, or raise UsageError."""
    for option in user_options:
        if not any(option in row.select_options(user_options) for row in rows):
            have = [
                name for name, row in SYSTEMS.items() if option in row.select_options(user_options)
            ]
            raise UsageError(
                f"--{option.replace('_', '-')} is an option of {', '.join(have)} only: name one of"
                " these systems with --system, or leave out the option"
            )


def system_options(
    row: System,
    user_options: Mapping[str, Any],
    available: Collection[str],
    calibrated: Collection[str] = (),
) -> dict[str, Any]:
    """Build the options of a published system's run; the user's options take precedence.

    `available` are the options that a run has, `calibrated` those that a benchmark sets itself. No
    part of the system is left out silently: UsageError names each missing part and its option. A
    system's name alone never implies an option that changes the output; the user has to give it.
    """
    result = {**row.settings(), **user_options}
    missing = []
    for option, what in row.parts().items():
        flag = f"--{option.replace('_', '-')}"
        if option in user_options or option in calibrated:
            continue
        if option not in available:
            missing.append(f"{what} ({flag}, an option that this version does not have)")
        elif option in ("split", "co_compute"):
            result[option] = "auto"
        else:
            missing.append(f"{what} ({flag})")
    if missing:
        raise UsageError(f"system {row.name} needs {', and '.join(missing)}")
    if row.preselected and "policy" not in user_options:
        result["policy"] = "lru"  # for the scratch slots: the chosen set is pinned
    return result
