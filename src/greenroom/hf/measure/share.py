"""Report of a benchmark for a public table: one block of Markdown, one of JSON.

A report has no path, no name of a file, machine or user, and no environment variable. Each part is
a value of a known kind; what could be such a name is left out, or said in general words.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import greenroom
from greenroom.config import BenchmarkConfig, LoadConfig, changed_options, flag, show_bytes
from greenroom.core.layout import SlotLayout
from greenroom.core.machine import Machine, machine_name
from greenroom.hf.checkpoint.checkpoint import Checkpoint
from greenroom.hf.checkpoint.gguf.checkpoint import GgufCheckpoint
from greenroom.hf.measure.entries import Entry
from greenroom.hf.measure.harness import Harness, Measurement
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.option import options_in
from greenroom.plan.intervals import mean_interval
from greenroom.runtime.measure.bandwidth import host_facts
from greenroom.sim.table import show_number

FORMAT, VERSION = "greenroom-benchmark", 1
FILES = ("FILE", "DIR", "MODEL")  # in the metavar of an option whose value may be a path
HARMLESS = re.compile(r"auto|off|on|shared|per-layer|[0-9.,]+")  # values of such an option
Interval = tuple[float, float, float]  # mean, and its 95 % interval


@dataclass(frozen=True, slots=True)
class Report:
    """A benchmark's report: facts by subject, and the figures of each system."""

    machine: Mapping[str, Any]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    systems: Sequence[Mapping[str, Any]]

    @classmethod
    def of(
        cls,
        harness: Harness,
        entries: Sequence[Entry],
        load: LoadConfig,
        how: BenchmarkConfig,
        profile: Machine | None,
    ) -> Report:
        """Make the report of measured entries.

        load:    the user's options, of which paths are left out
        profile: this machine's profile, which has the disk's speed; None if it was not measured
        """
        checkpoint = harness.setup.source.checkpoint
        return cls(
            _machine(harness, profile),
            {**_model(checkpoint), "experts_in_memory": harness.capacity},
            _settings(load, how),
            [_figures(entry) for entry in entries],
        )

    def as_json(self) -> dict[str, Any]:
        """Return a report as one JSON object."""
        return {
            "format": FORMAT, "version": VERSION, "greenroom": greenroom.__version__,
            "machine": dict(self.machine), "model": dict(self.model),
            "settings": dict(self.settings), "systems": [dict(each) for each in self.systems],
        }  # fmt: skip

    def as_markdown(self) -> str:
        """Return a report as Markdown: tables of facts and figures, then the JSON object."""
        machine, model = self.machine, self.model
        disk = machine["disk_bytes_per_s"]
        size, unit = (1e9, "billion") if model["parameters"] >= 1e9 else (1e6, "million")
        parameters = f"{model['parameters'] / size:.3g} {unit} parameters"
        facts = [
            ("Greenroom", greenroom.__version__),
            ("processor", f"{machine['cpu']}, {machine['cores']} cores"),
            ("memory", show_bytes(machine["memory_bytes"])),
            ("disk", "not measured" if disk is None else f"{disk / 1e9:.2f} GB/s"),
            ("GPU", ", ".join(machine["gpus"]) or "none"),
            ("system", machine["system"]),
            ("model", f"{model['architecture']}, {parameters}, {model['format']},"
                      f" {show_bytes(model['nbytes'])}"),
            ("experts in memory", f"{model['experts_in_memory']:,} of {model['experts']:,}"
                                  f" ({model['layers']} layers)"),
            ("settings", " ".join(f"{name} {value}" for name, value in self.settings.items())),
        ]  # fmt: skip
        rows = [
            (
                each["name"],
                _shown(each["tokens_per_s"]),
                _shown(each["tpot_s"], lambda s: f"{s * 1e3:.3g}"),
                _shown(each["ttft_s"]),
                _shown(each["hit_ratio"], lambda share: f"{share:.1%}"),
                _shown(each["bytes_per_token"], show_bytes),
            )
            for each in self.systems
        ]
        header = ("system", "tokens/s", "TPOT ms", "TTFT s", "hits", "read per token")
        return "\n\n".join([
            _table(("Greenroom benchmark", ""), facts),
            _table(header, rows) + "\n\nMeans, and their 95 % intervals over rounds.",
            f"```json\n{json.dumps(self.as_json())}\n```",
        ])  # fmt: skip


def _machine(harness: Harness, profile: Machine | None) -> dict[str, Any]:
    """Describe this machine: processor, memory, disk, GPUs and operating system."""
    host, setup = host_facts(), harness.setup
    local = profile is not None and machine_name(profile.host) == machine_name(host)
    return {
        "cpu": host["cpu"],
        "cores": host["cores"],
        "instructions": host["instructions"],
        "memory_bytes": int(psutil.virtual_memory().total),
        "disk_bytes_per_s": profile.routes[0].link.bandwidth if profile and local else None,
        "gpus": _gpus(setup.devices) if setup.cuda else [],
        "system": _system(),
    }


def _gpus(devices: Sequence[int]) -> list[str]:
    import torch

    return [torch.cuda.get_device_name(device) for device in devices]


def _system() -> str:
    """Name the operating system, without what a kernel's builder added to its version."""
    version = re.match(r"\d+(\.\d+)*", platform.release())
    return f"{platform.system()} {version[0] if version else ''} {platform.machine()}"


def _model(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe a model by its architecture and sizes, without its name."""
    skeleton = ModelSkeleton.of(checkpoint)
    streamed = sum(prod(each.shape) for layer in skeleton.layers for each in layer)
    dense = sum(weight.numel() for weight in skeleton.model.parameters())
    catalog = skeleton.catalog
    kinds = {kind for layout in catalog.layouts for kind in _kinds(layout)}
    container = (
        "pack" if checkpoint.pack is not None
        else "GGUF" if isinstance(checkpoint, GgufCheckpoint)
        else "safetensors"
    )  # fmt: skip
    return {
        "architecture": type(skeleton.model).__name__,
        "parameters": streamed + dense,
        "format": f"{container} {'+'.join(sorted(kinds))}",
        "nbytes": sum(Path(file).stat().st_size for file in checkpoint.files),
        "layers": len(catalog.layers),
        "experts": catalog.experts,
    }


def _kinds(layout: SlotLayout) -> set[str]:
    """Return the stored forms of an expert's matrices: encodings, or types of plain numbers."""
    plain = {
        tensor.dtype
        for tensor in layout.tensors
        if len(tensor.shape) > 1 and "." not in tensor.name and tensor.name not in layout.encodings
    }
    return plain | {*layout.encodings.values()}


def _settings(load: LoadConfig, how: BenchmarkConfig) -> dict[str, Any]:
    """List the options that differ from the defaults; a path becomes `(a file)`."""
    shown = {}
    for config in (load, how):
        metavars = {each.name: each.metadata["metavar"] or "" for each in options_in(config)}
        for name, value in changed_options(config).items():
            is_path = any(kind in metavars[name] for kind in FILES)
            public = not is_path or HARMLESS.fullmatch(str(value))
            shown[flag(name)] = value if public and not re.search(r"[/\\~]", str(value)) else (
                "(a file)")  # fmt: skip
    return {**shown, "--tokens": how.tokens, "--rounds": how.rounds}


def _figures(entry: Entry) -> dict[str, Any]:
    """Compute the figures of one system, each as a mean with its 95 % interval over rounds."""

    def over_rounds(value: Callable[[Measurement], float]) -> Interval:
        return mean_interval([value(each) for each in entry.rounds])

    tpot = mean_interval(entry.tpots)
    return {
        "name": entry.name,
        "policy": entry.config.policy,
        "prefetch": entry.config.prefetch,
        "rounds": len(entry.rounds),
        "tokens_per_s": tuple(1 / tpot[i] for i in (0, 2, 1)),
        "tpot_s": tpot,
        "ttft_s": over_rounds(lambda each: float(np.mean(each.ttft))),
        "hit_ratio": over_rounds(lambda each: 1 - each.miss_ratio),
        "bytes_per_token": over_rounds(lambda each: each.bytes_read / len(each.gaps)),
    }


def _shown(values: Interval, show: Callable[[float], str] = show_number) -> str:
    middle, low, high = map(show, values)
    return middle if low == high else f"{middle} ({low} to {high})"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
