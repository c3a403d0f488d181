"""Apply default settings to a run: stored or planned ones, and `--split auto`."""

from __future__ import annotations

from dataclasses import replace

from greenroom.config import LoadConfig, changed_options, scope_of, split_of
from greenroom.core.cache.scope import Scope, least_capacity
from greenroom.core.config.scheduler import TAU
from greenroom.core.layout import Catalog
from greenroom.core.machine import machine_name
from greenroom.core.pieces import Split
from greenroom.hf.history.split_counts import NAME as SPLIT
from greenroom.hf.history.split_counts import SplitCounts
from greenroom.hf.memory.setup import ModelSetup
from greenroom.hf.memory.slots import pieces_of
from greenroom.hf.memory.split import split_experts
from greenroom.plan.configurator import TokenLatency, configure, layer_statistics
from greenroom.plan.defaults import default_setting
from greenroom.plan.history.records import StoredSetting
from greenroom.plan.history.routing import RoutingHistory
from greenroom.plan.settings import PLAIN
from greenroom.runtime.measure.bandwidth import host_facts

LEAST_SHARE = 0.5  # `--split auto` needs at least the memory in which halves of experts work
CHOICES = {"policy", "scope", "split", "pin", "prefetch", "predictor", "no_guard", "prefetch_rule"}


def apply_defaults(setup: ModelSetup, config: LoadConfig, room: int, top_k: int) -> ModelSetup:
    """Return a run's setup with the default settings for this model and machine.

    room: expert slots that the settings are for, about as many as the run will have

    The settings (policy, scope, split, prefetch) are those that `greenroom tune` or `greenroom
    plan` stored, or else those that a quick simulation finds. The setup is returned unchanged if
    the user set one of these options, or if the settings cannot work with the setup.
    """
    if CHOICES & changed_options(config).keys() or not setup.remember or not setup.fingerprint:
        return setup
    if room >= setup.catalog.experts:  # settings would have no effect
        return setup
    sizes = setup.catalog.experts_per_layer
    setting = default_setting(
        setup.fingerprint, machine_name(host_facts()), sizes, top_k, room, device_of(setup)
    )
    if setting is None:
        return setup
    scope = scope_of(setting.options.get("scope", config.scope))
    shares, cut = split_of(setting.options.get("split", config.split)), setup
    if shares is not None:
        if setup.approximates_misses:  # experts that are split have no copies
            return setup
        assert not isinstance(shares, str)  # tune and plan have shares to split at
        catalog, split = split_experts(setup.catalog, shares, top_k)
        cut = replace(setup, catalog=catalog, split=split)
    least = least_capacity(pieces_of(cut), scope)
    if room < least:
        return setup
    return replace(
        cut,
        capacity=max(setup.capacity, least),
        policy=setting.options.get("policy", setup.policy),
        scope=scope,
        prefetch=setting.options.get("prefetch", setup.prefetch),
        settings_origin=_describe_origin(setting),
    )


def _describe_origin(setting: StoredSetting) -> str:
    """Describe where a setting comes from, for the start-up line.

    The result is "" for a quick plan that chose the default policy.
    """
    less = 1 - setting.tpot / setting.plain
    if setting.by == "quick":
        plain = setting.options.get("policy") == PLAIN.policy
        return "LRU, which misses no more experts than the default in a quick plan" if plain else ""
    how = "measured by tune" if setting.by == "tune" else "chosen by plan"
    return f"{how} on {setting.when}" + (
        f", {less:.0%} less time a token than LRU" if less > 0.005 else ""
    )


def device_of(setup: ModelSetup) -> str:
    """Return the name of the device that a run's settings are stored for: cuda or cpu."""
    return "cuda" if setup.cuda else "cpu"


def auto_split(
    catalog: Catalog, history: RoutingHistory | None, capacity: int, top_k: int
) -> tuple[Catalog, Split | None, Scope]:
    """Split experts for `--split auto`: return their catalog, sizes, and slots of each layer.

    Algorithm 1 of the MoEpic paper computes the shares and the numbers of slots from the expert
    counts of earlier runs. Until 5,000 tokens were counted, experts are not split, and all layers
    have equally many slots. Raises UsageError if the experts are not packed in segments.
    """
    counts = SplitCounts(catalog.offsets, history)
    enough = int(counts.activity.tokens.min()) >= TAU
    if history is None or SPLIT not in history.states or not enough:
        return catalog, None, "per-layer"
    latency = TokenLatency(*history.states[SPLIT]["latency"].tolist())
    chosen = configure(layer_statistics(counts.activity), float(capacity), latency)
    split_catalog, split = split_experts(catalog, [each.ratio for each in chosen], top_k)
    return split_catalog, split, tuple(each.budget for each in chosen)
