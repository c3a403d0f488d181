"""Start-up line of a loaded model: memory sizes, and flags that reproduce the run."""

from __future__ import annotations

import shlex

from transformers import PreTrainedModel

from greenroom.config import LoadConfig, changed_options, flag, format_amount, show_bytes
from greenroom.config.values import parse_adapters
from greenroom.core.config.base import VALUE
from greenroom.core.config.scheduler import option_names
from greenroom.hf.attach.attach import Greenroom
from greenroom.hf.checkpoint.pack.catalog import PackCatalog
from greenroom.predictors import AUTO, OFF, predictor
from greenroom.runtime.driver.stats import Stats
from greenroom.runtime.kernels.dense.stored import dense_bytes
from greenroom.runtime.kernels.dense.table import disk_bytes

# Options that the line repeats as given; those of the scheduler are repeated too.
AS_GIVEN = (
    "kv", "prompt_block", "disk_tables", "device", "host_memory", "readers", "direct",
    "read_limit", "repack", "dtype", "threads", "pin", "config", "adapter", "only_experts",
    "spare_devices", "device_placement",
)  # fmt: skip
LONGEST = 160  # characters of the short line
SEPARATOR = " · "


def startup_line(
    name: str, model: PreTrainedModel, config: LoadConfig, verbose: bool = False
) -> str:
    """Return a line of text that describes a loaded model's memory use.

    With `verbose` the line has all sizes, and the flags that reproduce the run. Both forms name
    options that change the model's output.
    """
    return _verbose_line(name, model, config) if verbose else _short_line(name, model, config)


def _short_line(name: str, model: PreTrainedModel, config: LoadConfig) -> str:
    """Return the short start-up line; optional items that would exceed LONGEST are left out."""
    greenroom = model.greenroom
    stats, setup = greenroom.stats(), greenroom.setup
    slots = show_bytes(stats.capacity * stats.slot_bytes)
    shown = name.rstrip("/").rpartition("/")[2][:40]
    kind, kv_bytes = setup.keys_values.kind, setup.keys_values.total_bytes(setup.context)
    kv = f" in {kind.name}, WHICH CHANGES THE OUTPUT," if kind.form else ""
    line = f"{shown}: {stats.capacity} of {stats.experts} experts in slots ({slots})"
    line += _adapters(greenroom, config)
    if setup.subset is not None:
        line += f" · {setup.subset.description}, WHICH CHANGES THE OUTPUT"
    if (at := setup.approximation) is not None:
        what = ["inexact misses"] * at.of_misses + ["biased routers"] * bool(at.bias)
        line += f" · {' and '.join(what)}, WHICH CHANGES THE OUTPUT"
    if setup.kernel_fallback:
        line += f" · kernels: {stats.kernels}"
    if len(setup.devices) > 1:
        line += f" · {setup.placement.short}"
    if greenroom.engine is not None and stats.co_compute is not None:
        line += " · misses on both processors, which may change last bits"
    line += f" · {show_bytes(kv_bytes)} of KV cache{kv} for {setup.context} tokens"
    for text in (
        _config_origin(greenroom).removeprefix(SEPARATOR),
        f"settings {setup.settings_origin.partition(',')[0]}" if setup.settings_origin else "",
        _memory(stats),
        f"{show_bytes(dense_bytes(model))} of dense parts",
        "--verbose says more",
    ):
        if text and len(line) + len(text) + 3 <= LONGEST:
            line += f" · {text}"
    return line


def _adapters(greenroom: Greenroom, config: LoadConfig) -> str:
    """Describe the adapters of a model, and how many experts they change; "" without any."""
    named, variants = parse_adapters(config.adapter), greenroom.setup.variants
    if variants is None:
        return f"{SEPARATOR}adapter {named[0].name}" if named else ""
    changed = sum(len(variants.changed(number)) for number in range(1, variants.count))
    return f"{SEPARATOR}{len(named)} adapter{'s' * (len(named) > 1)} with {changed} changed experts"


def _config_origin(greenroom: Greenroom) -> str:
    """Return where the config of a GGUF model comes from; "" for other models."""
    source = greenroom.setup.source
    text = source.checkpoint.config_origin if source is not None else ""
    return text and SEPARATOR + text


def _memory(stats: Stats) -> str:
    """Describe the process's memory and its budget; "" where neither is known."""
    budget = f"budget {show_bytes(stats.budget_bytes)}" if stats.budget_bytes else ""
    if stats.memory_bytes is None:
        return budget
    return f"memory {show_bytes(stats.memory_bytes)}" + f" of {budget}" * bool(budget)


def _verbose_line(name: str, model: PreTrainedModel, config: LoadConfig) -> str:
    """Return the verbose start-up line: all sizes, and flags that reproduce the run."""
    greenroom = model.greenroom
    stats, catalog = greenroom.stats(), greenroom.setup.catalog
    setup, tier = greenroom.setup, stats.host
    dense, tables = dense_bytes(model), disk_bytes(model)
    left = f" ({show_bytes(tables)} of embeddings stay on disk)" if tables else ""
    slots = stats.capacity * stats.slot_bytes
    budget = f"budget {show_bytes(stats.budget_bytes)}: " if stats.budget_bytes else ""
    reads = "direct" if greenroom.direct else "buffered"
    slot_budget = greenroom.slot_budget
    shrinks = slot_budget is not None and slot_budget.full_context_slots < stats.capacity
    threads = "1 thread" if config.readers == 1 else f"{config.readers} threads"
    slow = f", no faster than {config.read_limit}/s" if config.read_limit is not None else ""
    on_disk = stats.experts - stats.capacity
    warm = f", {greenroom.warm_experts} of them filled as earlier runs left them" * bool(
        greenroom.warm_experts
    )
    fewer = (
        f", {slot_budget.full_context_slots} with a full KV cache"
        if slot_budget is not None and shrinks
        else ""
    )
    kind, kv_bytes = setup.keys_values.kind, setup.keys_values.total_bytes(setup.context)
    quantised = f" in {kind.name}, which changes the output," if kind.form else ""
    approximation = f" · {_approximation(greenroom)}" if setup.approximation is not None else ""
    if setup.subset is not None:
        approximation = f" · {setup.subset.description}, which CHANGES THE OUTPUT{approximation}"
    kernels = f" · kernels: {stats.kernels}" if stats.kernels != greenroom.kernel.name else ""
    origin = f" · {setup.placement}" if len(setup.devices) > 1 else ""
    origin += f" · settings {setup.settings_origin}" if setup.settings_origin else ""
    packed = f", packed as {catalog.kind}" if isinstance(catalog, PackCatalog) else ""
    in_host = (
        f"up to {tier['capacity']} experts in host memory{_host_computes(greenroom)}, "
        if tier
        else ""
    )
    flags = " ".join(_flags(greenroom, stats, config))
    shared = (
        f" · slots are given back below {show_bytes(stats.pressure['reserve_bytes'])} of free"
        " memory"
        if stats.pressure is not None
        else ""
    )
    return (
        f"{name}: {budget}{show_bytes(dense)} of dense parts{left}, {stats.capacity} of"
        f" {stats.experts} experts in slots ({show_bytes(slots)};"
        f" {len(catalog.layers)} MoE layers{warm}{fewer}) and"
        f" {show_bytes(kv_bytes)} of KV cache{quantised} for {setup.context} tokens in"
        f" {_memory_name(greenroom)}, {in_host}"
        f"{f'{on_disk} experts' if on_disk else 'a copy of them'} on disk"
        f" ({show_bytes(catalog.all_experts_bytes)} in all, {reads} reads by"
        f" {threads}{slow}{packed})"
        f"{_adapters(greenroom, config)}{approximation}{kernels}{_config_origin(greenroom)}"
        f"{origin}{shared} · same again: {flags}"
    )


def _flags(greenroom: Greenroom, stats: Stats, config: LoadConfig) -> list[str]:
    """Return the command-line flags that load a model again with the same memory sizes."""
    setup, slot_budget = greenroom.setup, greenroom.slot_budget
    if slot_budget is not None and slot_budget.full_context_slots < stats.capacity:
        assert stats.budget_bytes is not None
        size = f"--memory {format_amount(stats.budget_bytes * 9999 // 10000, stats.budget_bytes)}"
    else:
        slots = stats.capacity * stats.slot_bytes
        size = f"--cache {format_amount(slots, slots + stats.slot_bytes - 1)}"
    if (gives_back := stats.pressure is not None) or config.pressure != "auto":
        size += f" --pressure {'on' if gives_back else 'off'}"
    flags = [size, f"--policy {stats.policy}", f"--kernels {greenroom.kernel.name}"]
    flags += [f"--context {setup.context}", *_prefetch(greenroom, config)]
    if setup.scope != "shared":
        numbers = () if isinstance(setup.scope, str) else setup.scope
        flags.append(f"--scope {','.join(f'{n:g}' for n in numbers) or setup.scope}")
    if config.split != "off":
        flags.append(f"--split {config.split}")
    elif setup.split is not None:  # from a stored setting
        cut = zip(setup.split.tops, setup.split.bottoms, strict=True)
        flags.append(f"--split {','.join(f'{a / (a + b):.4g}' for a, b in cut)}")
    repeated = {*AS_GIVEN, *option_names()}
    return flags + [
        flag(name) + (f" {one}" if one is not True else "")
        for name, value in changed_options(config).items()
        if name in repeated
        for one in (value if isinstance(value, tuple) else (value,))
    ]


def _approximation(greenroom: Greenroom) -> str:
    """Describe how misses are approximated, and that this changes the output."""
    setup, at = greenroom.setup, greenroom.setup.approximation
    assert at is not None
    secondary_slots = setup.copies.secondary_slots if setup.copies is not None else 0
    what = [
        f"below {share:g} of the gate weights {how}"
        for share, how in (
            (at.skip, "left out"),
            (at.substitute, "replaced by experts in the cache"),
            (at.low, f"in {at.precision} ({secondary_slots} slots{', exact later' * at.promote})"),
        )
        if share
    ]
    what += at.other
    parts = [f"misses {', '.join(what)}"] * bool(what)
    if at.bias:
        parts.append(f"routers prefer experts in the cache by {at.bias:g} of the range of scores")
    return f"{' and '.join(parts)}, which CHANGES THE OUTPUT, depending on the cache's content"


def _memory_name(greenroom: Greenroom) -> str:
    """Name the memory that has the expert slots; a GPU is named by its model."""
    return "memory" if greenroom.engine is None else f"{greenroom.engine.name}'s memory"


def _host_computes(greenroom: Greenroom) -> str:
    """Describe the misses that the host's CPU computes; "" where it computes none."""
    if greenroom.stats().co_compute is None:
        return ""
    bits = "" if greenroom.engine is None else ", which may change the last bits of an answer"
    return f", computed there where that is sooner{bits}"


def _prefetch(greenroom: Greenroom, config: LoadConfig) -> list[str]:
    """Return the flags that select the running predictor, or `--prefetch off` without one."""
    running = greenroom.predictor
    if running is None:
        return [f"--prefetch {OFF}"]
    auto = predictor(greenroom.setup.prefetch).kind is AUTO
    flags = [f"--prefetch {running.name if auto else greenroom.setup.prefetch}"]
    if config.predictor is not None:
        flags.append(f"--predictor {shlex.quote(config.predictor)}")
    if config.prefetch_rule != VALUE:
        flags.append(f"--prefetch-rule {config.prefetch_rule}")
    if config.predict_in != "auto":
        flags.append(f"--predict-in {config.predict_in}")
    return flags + ["--no-guard"] * config.no_guard
