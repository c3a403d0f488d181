"""Table of published systems: each row combines Greenroom's parts as a paper describes.

A row has an eviction policy, a scope, a predictor, and the further parts that a system needs. Its
`reading` says what the paper leaves open, and where we differ. All rows share our transfer queue
(demands first, chunks, a layer's wrong prefetches dropped), our expert groups and our streaming of
prompts, so that rows differ in decisions alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from greenroom.config import SCOPES
from greenroom.errors import UnknownName, UsageError

APPROXIMATION_OPTIONS = ("miss_precision", "low_below", "low_share", "low_follow")


@dataclass(frozen=True, slots=True)
class System:
    """Published system for MoE inference, as a combination of Greenroom's parts.

    prefetch:    a predictor, `NAME[:distance]`, or off
    guard:       prefetch only while it pays
    sizes:       how each layer's slots are found: `dp` (a dynamic programme), `configurator`
                 (MoEpic's Algorithm 1, with the split), or None if `scope` is enough
    split:       the top of an expert stays resident, the bottom is fetched
    preselected: the resident experts are chosen beforehand, by counts
    precision:   a copy of this precision may serve a miss, which changes the output
    co_compute:  the processor beside the weights may compute a miss
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
    preselected: bool = False
    precision: str | None = None
    co_compute: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the run options that every published system has."""
        return {
            "policy": self.policy,
            "scope": self.scope,
            "prefetch": self.prefetch,
            "no_guard": self.prefetch != "off" and not self.guard,
        }

    def parts(self) -> dict[str, str]:
        """Describe further parts of a published system, by the option that enables each."""
        parts = {}
        if self.sizes == "dp":
            parts["scope"] = "each layer's slots: a FILE of `greenroom trace budgets`"
        if self.split:
            parts["split"] = "split experts and sizes of layers by Algorithm 1"
        if self.preselected:
            parts["pin"] = "a set of experts chosen beforehand: a FILE of `greenroom trace hot`"
        if self.precision is not None:
            parts["miss_precision"] = f"misses in {self.precision}, which change the output"
        if self.co_compute:
            parts["co_compute"] = "misses computed by the processor beside their weights"
        return parts

    def calibrated_options(self) -> tuple[str, ...]:
        """List a published system's options that are calibrated on recorded routing."""
        sized = ("scope",) if self.sizes is not None else ()
        return (*sized, *("split",) * self.split, *("pin",) * self.preselected)

    def select_options(self, user_options: Mapping[str, Any]) -> dict[str, Any]:
        """Select the user's options that apply to one of several compared systems.

        Options of a part apply to the rows that have it, all others to every row. To a row that
        splits experts, sizes of layers apply only together with a split.
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
            "an LRU cache of equal size for each layer; the next layer's gate, on this"
            " layer's hidden states, predicts what to prefetch while this layer is computed. Its"
            " mixed quantisation is left to the checkpoint: give it a quantised one",
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
            "evicts by the activation matrices of the most similar earlier requests, and"
            " prefetches the experts that they used in the layers ahead",
            policy="moe-infinity",
            prefetch="eamc",
        ),
        System(
            "promoe",
            "Song et al., 2024: ProMoE",
            "LRU, as in the paper's baseline with all other parts on; a trained predictor for each"
            " layer. Chunks, early preemption and reordered inference are in every row",
            prefetch="learned",
        ),
        System(
            "moepic",
            "Yan et al., 2025: MoEpic",
            "LCP; sizes of layers and split ratios by Algorithm 1; the next layer's gate prefetches"
            " bottoms of resident experts, and all of the others",
            policy="lcp",
            scope="per-layer",
            prefetch="next-gate:1",
            sizes="configurator",
            split=True,
        ),
        System(
            "pre-gated",
            "Hwang et al., 2024: Pre-gated MoE",
            "gates that were trained to choose experts a layer ahead, so that prefetches are never"
            " wrong; LRU eviction. With a model that was not trained so, its gates only guess",
            prefetch="pregated",
        ),
        System(
            "hobbit",
            "Tang et al., 2024: HOBBIT",
            "evicts by its combined score (docs/policies.md); the next layer's gate"
            " prefetches; misses with a low gate weight come in int4",
            policy="hobbit",
            prefetch="next-gate:1",
            precision="int4",
        ),
        System(
            "fate",
            "Fang et al., 2025: Fate",
            "a cache that favours shallow layers, and the gate of the layer ahead. Its hybrid"
            " quantisation is left to the checkpoint",
            policy="fate",
            prefetch="next-gate:1",
        ),
        System(
            "hybrimoe",
            "Zhong et al., 2025: HybriMoE",
            "evicts by scores of the gate; the next layer's gate prefetches; both"
            " processors share the misses, by which queue ends first",
            policy="hybrimoe",
            prefetch="next-gate:1",
            co_compute=True,
        ),
        System(
            "fiddler",
            "Kamahori et al., 2024: Fiddler",
            "the most popular experts stay; the host computes others whenever that is faster"
            " than moving them",
            policy="static",
            preselected=True,
            co_compute=True,
        ),
        System(
            "llru",
            "Layered paging (LLRU)",
            "its eviction policy alone, as the paper measures it",
            policy="llru",
        ),
        System(
            "static",
            "the baseline of ProMoE, section 5.1",
            "the most popular experts stay, others pass through scratch slots",
            policy="static",
            preselected=True,
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
    """Return the published system of a given name; UnknownName lists the names."""
    try:
        return SYSTEMS[name]
    except KeyError:
        raise UnknownName("system", name, SYSTEMS) from None


def systems(text: str) -> list[System]:
    """Parse the names `A,B,C` into published systems, each once; UnknownName."""
    return [system(name) for name in dict.fromkeys(part.strip() for part in text.split(","))]


def part_of(option: str, value: Any) -> str | None:
    """Return the part of a system that an option sets; None for general options."""
    if option in APPROXIMATION_OPTIONS:
        return APPROXIMATION_OPTIONS[0]
    if option == "scope":  # a name is an option of every row; sizes of layers are a part
        return None if value in SCOPES else option
    return option if option in ("pin", "split", "co_compute", "predictor") else None


def check_parts(rows: Sequence[System], user_options: Mapping[str, Any]) -> None:
    """Check that every option belongs to a part of these published systems. UsageError."""
    for option in user_options:
        if not any(option in row.select_options(user_options) for row in rows):
            have = [
                name for name, row in SYSTEMS.items() if option in row.select_options(user_options)
            ]
            raise UsageError(
                f"--{option.replace('_', '-')} is an option of {', '.join(have)} only: name one of"
                " them, or leave it out"
            )


def system_options(
    row: System,
    user_options: Mapping[str, Any],
    available: Collection[str],
    calibrated: Collection[str] = (),
) -> dict[str, Any]:
    """Build the options of a published system's run; the user's options take precedence.

    `available` are the options of a run, `calibrated` those that a calibration sets. UsageError
    names every missing part and its option, since no part is left out silently. Options that change
    the output are never implied by a system's name: the user gives them.
    """
    result = {**row.settings(), **user_options}
    missing = []
    for option, what in row.parts().items():
        flag = f"--{option.replace('_', '-')}"
        if option in user_options or option in calibrated:
            continue
        if option not in available:
            missing.append(f"{what} ({flag}, which this version does not have)")
        elif option in ("split", "co_compute"):
            result[option] = "auto"
        else:
            missing.append(f"{what} ({flag})")
    if missing:
        raise UsageError(f"system {row.name} needs {', and '.join(missing)}")
    if row.preselected and "policy" not in user_options:
        result["policy"] = "lru"  # for the scratch slots: the chosen set is pinned
    return result
