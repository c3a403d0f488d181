"""The kernel table: every encoding and shape by graph replay, and transformers' grouped_mm.

Only the launches are timed: routing and kernel arguments are already on the device. `host_ms` is
the time of a model's step, Python included.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine
import shapes
import torch
from kernel_layers import Layer, choices, inputs, module_of, whole_step, with_weights
from ledger import Ledger, NotHere

from greenroom.runtime.kernels.eager import EagerKernel
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.triton import TritonKernel, fallback_reason

FOLDER = Path(__file__).resolve().parent
SLOT_BYTES = 8 << 30  # of a layer: many times any cache
COPIED = 4 << 30  # bytes of the copy that measures memory
SETS = {1: 16, 16: 4}  # tokens -> choices of experts that take turns; one of more tokens
FAR = 0.05  # relative distance from eager beyond which a result is wrong
COMPILERS = 8  # processes
SANITIZER_S = 150
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


class Cells:
    """The part "kernels"."""

    def __init__(self, args: argparse.Namespace, ledger: Ledger) -> None:
        self._args, self._smoke = args, args.smoke
        self._device = machine.device(args.smoke)

    @torch.inference_mode()
    def measure(self, cell: str) -> dict[str, Any]:
        """A cell's figures."""
        gc.collect()  # the layer before takes gigabytes
        if cell == "memory":
            return memory(self._device, 1 << 20 if self._smoke else COPIED)
        if cell == "compile":
            return self._compile()
        if cell == "sanitizer":
            return self._sanitizer()
        name, encoding = cell.split(":")
        shape = shapes.kernels(self._smoke)[name]
        if encoding == shapes.GROUPED:
            return {"rows": self._grouped(shape)}
        return {"rows": self._encoded(shape, encoding)}

    def _encoded(self, shape: shapes.Shape, encoding: str) -> list[dict[str, Any]]:
        layer = Layer.make(shape, encoding, self._device, self._most())
        if (why := fallback_reason(layer.experts)) is not None:
            raise NotHere(why)
        kernel, rows = TritonKernel(), []
        for tokens in shapes.tokens(self._smoke):
            x, weights = inputs(shape, tokens, self._device)
            sets = choices(shape, tokens, 1 if self._smoke else SETS.get(tokens, 1))
            far = distance(kernel, layer, x, weights, sets[0])
            steps, used = [], 0
            for choice in sets:
                routing = Routing.of(choice, shape.experts)
                step, chosen = kernel.begin(layer.experts, x, routing, weights), routing.experts
                slots = layer.slots_of(chosen.tolist())
                steps.append((step, step.send(chosen.tolist(), slots, layer.experts)))
                used += len(chosen)

            def launches(steps: Any = steps) -> None:
                for step, arguments in steps:
                    step.project(arguments, layer.experts)
                    kernel.combine(step)

            seconds, timed = machine.device_seconds(launches, self._device)
            row = row_of(shape, tokens, seconds / len(sets), used / len(sets), layer.nbytes)
            host = 0.0 if self._smoke else machine.wall_seconds(
                lambda x=x, w=weights, c=sets[0]: whole_step(kernel, layer, x, w, c), self._device
            )  # fmt: skip
            rows.append({**row, "timed": timed, "distance": far, "host_ms": host * 1e3})
        return rows

    def _grouped(self, shape: shapes.Shape) -> list[dict[str, Any]]:
        nbytes = 6 * shape.hidden * shape.inner
        if not self._smoke and shape.experts * nbytes > 0.6 * torch.cuda.mem_get_info()[0]:
            raise NotHere("the GPU has no room for all experts in bfloat16")
        module, rows = with_weights(module_of(shape), self._device), []
        module.config._experts_implementation = shapes.GROUPED
        for tokens in shapes.tokens(self._smoke):
            x, weights = inputs(shape, tokens, self._device)
            sets = choices(shape, tokens, 1 if self._smoke else SETS.get(tokens, 1))
            indices = [torch.from_numpy(choice.copy()).to(self._device) for choice in sets]

            def forwards(x: Any = x, weights: Any = weights, indices: Any = indices) -> None:
                for index in indices:
                    module(x, index, weights)

            seconds, timed = machine.device_seconds(forwards, self._device)
            used = sum(len(index.unique()) for index in indices) / len(sets)
            row = row_of(shape, tokens, seconds / len(sets), used, nbytes)
            rows.append({**row, "timed": timed})
        return rows

    def _most(self) -> int:
        return SLOT_BYTES if self._smoke else min(SLOT_BYTES, torch.cuda.mem_get_info()[0] // 3)

    def _compile(self) -> dict[str, Any]:
        """Have every kernel of the table compiled, in processes; Triton keeps them on disk."""
        begin = time.perf_counter()
        if self._smoke:
            compiled(0, 1, smoke=True)
            return {"processes": 1, "seconds": time.perf_counter() - begin}
        count = max(1, min(COMPILERS, os.cpu_count() or 1))
        command = [sys.executable, str(FOLDER / "warm.py")]
        running = [subprocess.Popen([*command, str(n), str(count)]) for n in range(count)]
        codes = [each.wait(max(1.0, self._args.until - time.time())) for each in running]
        if any(codes):
            raise RuntimeError(f"compiling the kernels failed with exit codes {codes}")
        return {"processes": count, "seconds": time.perf_counter() - begin}

    def _sanitizer(self) -> dict[str, Any]:
        """One small step under compute-sanitizer."""
        tool = next(filter(None, map(shutil.which, SANITIZERS)), None)
        if tool is None or self._smoke:
            raise NotHere(
                "compute-sanitizer is not installed" if tool is None else "a dry run (--smoke)"
            )
        command = [tool, "--tool", "memcheck", sys.executable, str(FOLDER / "warm.py"), "small"]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        limit = max(1.0, min(SANITIZER_S, self._args.until - time.time()))
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True,
                timeout=limit, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise NotHere(f"compute-sanitizer took longer than {limit:.0f} s") from error
        print(done.stdout, flush=True)
        lines = [line for line in done.stdout.splitlines() if "=====" in line]
        summary = next((line for line in lines if "ERROR SUMMARY" in line), "")
        if done.returncode or not summary:
            raise NotHere(f"compute-sanitizer: {(lines or ['no output'])[-1].strip('= ')}")
        return {"summary": summary.strip("= "), "lines": lines[:40]}


def memory(device: torch.device, nbytes: int) -> dict[str, Any]:
    """Bytes a second within the device: a copy, read and written bytes together, and a sum."""
    source = torch.empty(nbytes // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    copied = machine.device_seconds(lambda: target.copy_(source), device)[0]
    read = machine.device_seconds(source.sum, device)[0]
    return {"copy_gb_s": 2 * nbytes / copied / 1e9, "read_gb_s": nbytes / read / 1e9}


def row_of(
    shape: shapes.Shape, tokens: int, seconds: float, used: float, nbytes: int
) -> dict[str, Any]:
    """A row of the table: `used` experts of `nbytes` in a step of so many tokens."""
    work = 2 * tokens * shape.top_k * 3 * shape.hidden * shape.inner
    return {
        "tokens": tokens, "us": seconds * 1e6, "experts": used, "expert_bytes": nbytes,
        "gb_s": used * nbytes / seconds / 1e9, "tflop_s": work / seconds / 1e12,
    }  # fmt: skip


def distance(kernel: Any, layer: Layer, x: Any, weights: Any, choice: Any) -> float:
    """Relative distance of a step's result from eager; RuntimeError if it is above FAR."""
    got = whole_step(kernel, layer, x, weights, choice).double()
    want = whole_step(EagerKernel(), layer, x, weights, choice).double()
    relative = float((got - want).norm() / want.norm())
    if not relative <= FAR:
        raise RuntimeError(
            f"{x.shape[0]} tokens: the relative distance from eager is {relative:.3g}, above {FAR}"
        )
    return relative


@torch.inference_mode()
def compiled(number: int, count: int, smoke: bool = False) -> None:
    """Run every count-th row of the table once with few experts, which compiles its kernels."""
    device = machine.device(smoke)
    for row, (name, encoding) in enumerate(shapes.encodings(smoke)):
        if row % count == number:
            shape = shapes.kernels(smoke)[name]
            layer = Layer.make(shape, encoding, device, most=1)
            for tokens in (1,) if smoke else shapes.tokens(smoke)[:3]:
                x, weights = inputs(shape, tokens, device)
                whole_step(TritonKernel(), layer, x, weights, choices(shape, tokens, 1)[0])
            machine.synchronize(device)
