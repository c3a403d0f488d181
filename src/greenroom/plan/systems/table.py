"""Named systems: what a paper describes, as a row that puts our own parts together.

A row says who is evicted, how slots are shared out, what is fetched ahead and by whom, and which
further parts a system needs. What a paper leaves open, or what we do otherwise, is its `reading`.
All rows share our transfer queue (demands first, chunks, a layer's wrong prefetches dropped), our
groups and our prompts that stream through: a comparison of rows is one of decisions alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from greenroom.config import SCOPES
from greenroom.errors import UnknownName, UsageError

NO_GUARD = "prefetches whether it pays or not"
LOW = ("miss_precision", "low_below", "low_share", "low_follow")  # these go together


@dataclass(frozen=True, slots=True)
class System:
    """A row. `prefetch` is a predictor, `NAME[:distance]`, or off; with `guard` only while it pays.

    sizes:     how each layer's slots are found: `dp` (a dynamic programme), `configurator`
               (MoEpic's Algorithm 1, with the split), or None where `scope` says all
    split:     a top part of each expert stays, the bottom is fetched
    chosen:    what stays is chosen beforehand, by counts
    precision: a miss may be served from a copy of so many bits, which changes the output
    both:      a miss may be computed where the weights are
    """

    name: str
    source: str
    reading: str
    policy: str = "lru"
    scope: str = "shared"
    prefetch: str = "off"
    guard: bool = False
    sizes: str | None = None
    split: bool = False
    chosen: bool = False
    precision: str | None = None
    both: bool = False

    def settings(self) -> dict[str, Any]:
        """The options of a run that every row has."""
        return {
            "policy": self.policy,
            "scope": self.scope,
            "prefetch": self.prefetch,
            "no_guard": self.prefetch != "off" and not self.guard,
        }

    def parts(self) -> dict[str, str]:
        """Further parts, by the option that each of them is: what it needs, in words."""
        parts = {}
        if self.sizes == "dp":
            parts["scope"] = "each layer's slots: a FILE of `greenroom trace budgets`"
        if self.split:
            parts["split"] = "split experts and sizes of layers by Algorithm 1"
        if self.chosen:
            parts["pin"] = "a set chosen beforehand: a FILE of `greenroom trace hot`"
        if self.precision is not None:
            parts["miss_precision"] = f"misses in {self.precision}, which change the output"
        if self.both:
            parts["co_compute"] = "misses computed where they are"
        return parts

    def routed(self) -> tuple[str, ...]:
        """Those parts, as options, that a recording of routing says."""
        sized = ("scope",) if self.sizes is not None else ()
        return (*sized, *("split",) * self.split, *("pin",) * self.chosen)

    def takes(self, user_options: Mapping[str, Any]) -> dict[str, Any]:
        """What goes to this row of the options given beside several: parts to the rows that have
        them, all others to every row. Sizes go to a row that splits with the split only, since they
        are found together."""
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
            "an LRU cache of equal size for each layer; the next layer's gate, asked with this"
            " layer's hidden states, says what is fetched while this one is computed. Its mixed"
            " quantisation is the checkpoint's affair here: give it a quantised one",
            scope="per-layer",
            prefetch="next-gate:1",
        ),
        System(
            "adapmoe",
            "Zhong et al., 2024: AdapMoE, as MoEpic cites it",
            "LRU with each layer's size by a dynamic programme; the next layer's gate prefetches."
            " Its adaptive gating leaves experts out, which changes the output, and is left out",
            prefetch="next-gate:1",
            sizes="dp",
        ),
        System(
            "moe-infinity",
            "Xue et al., 2024: MoE-Infinity",
            "evicts by the activation matrices of the requests that are most alike, and fetches"
            " what they would use in the layers ahead",
            policy="moe-infinity",
            prefetch="eamc",
        ),
        System(
            "promoe",
            "Song et al., 2024: ProMoE",
            "LRU, its own baseline with everything else switched on; a trained predictor for each"
            " layer. Chunks, early preemption and reordered inference are in every row",
            prefetch="learned",
        ),
        System(
            "moepic",
            "Yan et al., 2025: MoEpic",
            "LCP; sizes of layers and split ratios by Algorithm 1; the next layer's gate fetches"
            " bottoms of what is resident, and the whole of what is not",
            policy="lcp",
            scope="per-layer",
            prefetch="next-gate:1",
            sizes="configurator",
            split=True,
        ),
        System(
            "pre-gated",
            "Hwang et al., 2024: Pre-gated MoE",
            "gates that were trained to choose a layer ahead, so that what is fetched is never"
            " wrong; LRU for what stays. With a model that was not trained so, its gates guess",
            prefetch="pregated",
        ),
        System(
            "hobbit",
            "Tang et al., 2024: HOBBIT",
            "evicts by its several-sided score (docs/policies.md); the next layer's gate"
            " prefetches; misses of small gate weight come in int4",
            policy="hobbit",
            prefetch="next-gate:1",
            precision="int4",
        ),
        System(
            "fate",
            "Fang et al., 2025: Fate",
            "a cache that favours shallow layers, and the gate of the layer ahead. Its hybrid"
            " quantisation is the checkpoint's affair here",
            policy="fate",
            prefetch="next-gate:1",
        ),
        System(
            "hybrimoe",
            "Zhong et al., 2025: HybriMoE",
            "evicts by scores of the gate; the next layer's gate prefetches; misses are shared out"
            " between both processors as their queues end",
            policy="hybrimoe",
            prefetch="next-gate:1",
            both=True,
        ),
        System(
            "fiddler",
            "Kamahori et al., 2024: Fiddler",
            "the most popular experts stay, and others are computed where they are whenever that"
            " is sooner than to move them",
            policy="static",
            chosen=True,
            both=True,
        ),
        System(
            "llru",
            "Layered paging (LLRU)",
            "its policy alone, as the paper measures it",
            policy="llru",
        ),
        System(
            "static",
            "the baseline of ProMoE, section 5.1",
            "the most popular experts stay, others pass through scratch slots",
            policy="static",
            chosen=True,
        ),
        System(
            "greenroom",
            "ours",
            "next-use, and prefetching while it pays",
            policy="auto",
            prefetch="auto",
            guard=True,
        ),
    )
}


def system(name: str) -> System:
    """The row of that name; UnknownName lists them."""
    try:
        return SYSTEMS[name]
    except KeyError:
        raise UnknownName("system", name, SYSTEMS) from None


def systems(text: str) -> list[System]:
    """`A,B,C`, each once; UnknownName."""
    return [system(name) for name in dict.fromkeys(part.strip() for part in text.split(","))]


def part_of(option: str, value: Any) -> str | None:
    """The part of a row that an option of a run is; None of one that every row can have."""
    if option in LOW:
        return LOW[0]
    if option == "scope":  # by name it is how slots are shared out, else each layer's sizes
        return None if value in SCOPES else option
    return option if option in ("pin", "split", "co_compute", "predictor") else None


def check_parts(rows: Sequence[System], user_options: Mapping[str, Any]) -> None:
    """UsageError for an option that is a part of none of these rows: it would do nothing."""
    for option in user_options:
        if not any(option in row.takes(user_options) for row in rows):
            have = [name for name, row in SYSTEMS.items() if option in row.takes(user_options)]
            raise UsageError(
                f"--{option.replace('_', '-')} is a part of {', '.join(have)}: name one of them, or"
                " leave it out"
            )


def system_options(
    row: System,
    user_options: Mapping[str, Any],
    available: Collection[str],
    calibrated: Collection[str] = (),
) -> dict[str, Any]:
    """The options of a run that make a row: `given` by the user go before the row's own.

    `known` are the options that there are, `later` those that somebody will find. UsageError names
    every part that is missing, and what would bring it: nothing of a row is left out in silence.
    What changes the output is never switched on by a name: the user gives it.
    """
    result = {**row.settings(), **user_options}
    missing = []
    for option, what in row.parts().items():
        flag = f"--{option.replace('_', '-')}"
        if option in user_options or option in calibrated:
            continue
        if option not in available:
            missing.append(f"{what} ({flag}, which is not built)")
        elif option in ("split", "co_compute"):
            result[option] = "auto"
        else:
            missing.append(f"{what} ({flag})")
    if missing:
        raise UsageError(f"system {row.name} needs {', and '.join(missing)}")
    if row.chosen and "policy" not in user_options:
        result["policy"] = "lru"  # of the scratch slots: what was chosen stays by itself
    return result
