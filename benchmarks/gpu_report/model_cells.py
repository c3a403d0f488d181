"""Models of a few layers: the tier at several residencies, transformers and plain copies.

All misses of the tier are served from host memory, which has read every expert before.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import machine
import numpy as np
import shapes
from baselines import Experts, copies, stock
from bench import Bench, clocked, kernel_copy, plain_copy, profiled, tier_copy
from ledger import Ledger
from playing import decoding, prefill
from safetensors.torch import load_file
from weights import make_checkpoint

from greenroom.core.config.scheduler import SchedulerConfig

LAYERS = 8
PREFILLS = ("100%", "25%")  # residencies at which a prompt is read in blocks of several sizes
PROMPT = 4096  # tokens
WARM, TOKENS = 40, 60  # passes that are not timed, and decoded tokens that are


class Cells:
    """The part "models"; a cell is a model and a way to compute it."""

    def __init__(self, args: argparse.Namespace, ledger: Ledger) -> None:
        self._args, self._smoke = args, args.smoke
        self._layers = 2 if args.smoke else LAYERS
        self._prompt = 32 if args.smoke else PROMPT
        self._warm, self._tokens = (3, 5) if args.smoke else (WARM, TOKENS)
        self._blocks = (16, 32) if args.smoke else shapes.BLOCKS
        self._device = machine.device(args.smoke)
        self._name, self._bench, self._experts = "", None, None

    def measure(self, cell: str) -> dict[str, Any]:
        """A cell's figures."""
        name, what = cell.split(":")
        bench = self._model(name)
        gc.collect()
        kind, _, share = what.partition(" ")
        if kind == "link":
            # 16 parts of 2 MiB: what a token misses in a layer.
            large, small = (1 << (20 if self._smoke else n) for n in (29, 25))
            return {
                "gb_s": plain_copy(self._device, large) / 1e9,
                "small_gb_s": plain_copy(self._device, small) / 1e9,
                "kernel_gb_s": kernel_copy(self._device, small, 16) / 1e9,
            }
        if kind == "transformers":
            return self._transformers(bench)
        ratio = float(share.rstrip("%")) / 100
        if kind == "copies":
            return self._copies(bench, ratio)
        if kind == "trace":
            with bench.attached(ratio):
                return profiled(bench, self._decoding(bench), self._warm, self._args.out)
        return self._tier(bench, ratio, co_compute=kind == "co-compute", prefills=share in PREFILLS)

    def _model(self, name: str) -> Bench:
        if self._name != name or self._bench is None:
            self._bench = self._experts = None
            gc.collect()
            shape = shapes.models(self._smoke)[name]
            folder = make_checkpoint(self._args.scratch / name, shape, self._layers)
            self._bench, self._name = Bench(folder, shape, self._device, self._smoke), name
        return self._bench

    def _stacked(self, bench: Bench) -> Experts:
        """A layer's weights for the baselines; they are the same in every layer."""
        if self._experts is None:
            prefix = "model.layers.0.mlp.experts."
            tensors = load_file(bench.folder / "layer-0.safetensors")
            experts_tensors = {
                k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)
            }
            self._experts = Experts.read(experts_tensors, bench.shape.experts, self._device)
        return self._experts

    def _decoding(self, bench: Bench) -> Any:
        return decoding(bench.shape, self._warm + self._tokens)

    def _prefills(self, bench: Bench) -> dict[str, float]:
        """Tokens a second of a prompt that is read in blocks, by the size of a block."""
        figures = {}
        for block in self._blocks:
            request = prefill(bench.shape, self._prompt, block)
            figures[str(block)] = self._prompt / sum(bench.passes(request, warm=1))
        return figures

    def _transformers(self, bench: Bench) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for kind in (shapes.GROUPED, "eager"):
            with stock(bench.model, bench.names, self._stacked(bench), kind):
                times = bench.passes(self._decoding(bench))[self._warm :]
                figures[kind] = {"token_ms": statistics.median(times) * 1e3}
                if kind == shapes.GROUPED:
                    figures[kind]["prefill"] = self._prefills(bench)
        return figures

    def _copies(self, bench: Bench, ratio: float) -> dict[str, Any]:
        resident = max(1, int(bench.shape.experts * ratio))
        with copies(bench.model, bench.names, self._stacked(bench), resident) as counts:
            times = bench.passes(self._decoding(bench))[self._warm :]
            figures = {
                "token_ms": statistics.median(times) * 1e3,
                "hits": 1 - counts["copied"] / counts["requests"],
            }
            if ratio == 0.25:
                figures["prefill"] = self._prefills(bench)
        return figures

    def _tier(self, bench: Bench, ratio: float, co_compute: bool, prefills: bool) -> dict[str, Any]:
        config = SchedulerConfig(co_compute="auto" if co_compute else "off")
        with bench.attached(ratio, config=config) as part, clocked(part) as spent:
            speed = tier_copy(bench, part)
            play, begin = bench.player(self._decoding(bench)), time.perf_counter()
            for number in range(self._warm):
                play(number)
            part.reset_stats()
            for name in spent:
                spent[name] = 0.0
            times = [play(number) for number in range(self._warm, self._warm + self._tokens)]
            stats = part.stats()
            figures: dict[str, Any] = {
                "token_ms": statistics.median(times) * 1e3,
                "mean_ms": float(np.mean(times)) * 1e3,
                "bytes_a_token": stats.links[1]["bytes"] / self._tokens,
                "hits": stats.hit_ratio,
                "tier_gb_s": speed / 1e9,
                "stalls_ms": stats.stall_s / self._tokens * 1e3,
                "kernels": stats.kernels,
                "on_host": (stats.co_compute or {}).get("on_host", 0),
                "wall_s": time.perf_counter() - begin,
            }
            figures |= {f"{name}_ms": s / self._tokens * 1e3 for name, s in spent.items()}
            if prefills:
                figures["prefill"] = self._prefills(bench)
        return figures
