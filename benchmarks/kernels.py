"""Speed of the expert kernels as a share of memory bandwidth, and Python's cost.

    python benchmarks/kernels.py [--threads N] [--wall] [--encodings [NAME ...]] [--tokens T ...]

--encodings: experts in every encoding, of OLMoE's and Qwen3-30B-A3B's shapes, by `native` and
`rounded`, in turns with bf16 and with the floor; medians.

Weights are random and larger than the caches. Every row has a floor that is measured right
before it: the speed at which `torch.sum` reads memory. Best of several; with one thread CPU time
is taken, so that other processes on the machine matter less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

from greenroom.core.layout import BLOCKS, SlotLayout
from greenroom.hf.pack.exponents import bf12
from greenroom.runtime.encodings.bf12 import escape_room
from greenroom.runtime.kernels import panel_order
from greenroom.runtime.kernels.dense.accelerate import accelerate
from greenroom.runtime.kernels.layer import LayerExperts
from greenroom.runtime.kernels.recipes import Recipe
from greenroom.runtime.kernels.routing import Routing
from greenroom.runtime.kernels.table import make_kernel
from greenroom.runtime.measure.kernels import SwiGLUExperts, compute_step, random_layer
from greenroom.runtime.slots.host import HostSlots

EXPERTS, TOP_K = 48, 8
LAYER_BYTES = 192 << 20  # of encoded experts
SHAPES = ((1024, 512, False), (2048, 768, False), (1024, 512, True))


class Clock:
    """Measures the best of several runs of a call in seconds; fewer runs in a dry run."""

    def __init__(self, wall: bool, quick: bool) -> None:
        self.now, self.quick = time.perf_counter if wall else time.thread_time, quick

    def best(self, work: Callable[[], object], seconds: float = 0.8, least: int = 3) -> float:
        best, count = float("inf"), 0
        end = time.perf_counter() + (0 if self.quick else seconds)
        while count < least or time.perf_counter() < end:
            start = self.now()
            work()
            best, count = min(best, self.now() - start), count + 1
        return best

    def floor(self) -> float:
        """Bytes a second at which memory is read."""
        return _READ.nbytes / self.best(_READ.sum, 0.4)


_READ = torch.ones(48 << 20)


def expert_rows(clock: Clock) -> None:
    """Print the expert table: both kernels, one token and prompts, plain and transposed."""
    print(f"{'experts':22}{'tokens':>7}{'eager ms':>10}{'native ms':>10}{'gain':>7}", end="")
    print(f"{'GB/s':>7}{'floor':>7}{'ratio':>7}{'GFLOP/s':>9}")
    for hidden, inner, transposed in SHAPES[:1] if clock.quick else SHAPES:
        experts = random_layer(hidden, inner, EXPERTS, transposed)
        for tokens in (1,) if clock.quick else (1, 16, 128):
            cases = []
            for _ in range(4):
                scores = torch.rand(tokens, EXPERTS)
                index = scores.topk(TOP_K).indices
                x = torch.randn(tokens, hidden).bfloat16()
                cases.append((x, index, scores.gather(1, index).bfloat16()))
            floor, times = clock.floor(), []
            for name in ("eager", "native"):
                chosen, turn = make_kernel(name), iter(range(1 << 30))
                compute_step(chosen, experts, *cases[0])
                run = lambda: compute_step(chosen, experts, *cases[next(turn) % 4])  # noqa: E731, B023
                times.append(clock.best(run))
            distinct = float(np.mean([len(case[1].unique()) for case in cases]))
            speed = distinct * experts.layout.nbytes / times[1]
            flops = tokens * TOP_K * 6 * hidden * inner / times[1]
            name = f"{hidden}x{inner}{' transposed' if transposed else ''}"
            print(f"{name:22}{tokens:7}{times[0] * 1e3:10.2f}{times[1] * 1e3:10.2f}", end="")
            print(f"{times[0] / times[1]:6.1f}x{speed / 1e9:7.1f}{floor / 1e9:7.1f}", end="")
            print(f"{speed / floor:7.2f}{flops / 1e9:9.0f}")


GGML = (
    *("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "gguf_mxfp4", "gguf_nvfp4"),
    *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"),
)
CODEBOOKS = "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"
DECODED = (*CODEBOOKS, "tq2_0")  # ggml's types that are multiplied as float32
STORED = (*GGML, "mxfp4", "int8", "int4", "fp8", "bf12")
ENCODED_KERNELS = ("native", "rounded")
KERNELS_OF = {name: make_kernel(name) for name in ENCODED_KERNELS}
ENCODED_SHAPES = ((2048, 1024), (2048, 768))
HALVES = {
    **dict.fromkeys(("q8_0", "q4_0", "q5_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("q4_k", "q5_k", "q4_1", "q5_1"), (0, 2)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
    "tq2_0": (64,),
    **dict.fromkeys((name for name in CODEBOOKS if name != "iq1_m"), (0,)),
}


def encoded_layer(
    encoding: str, hidden: int, inner: int, kernels: str = "native", nbytes: int = LAYER_BYTES
) -> LayerExperts:
    """A layer of experts with random codes in an encoding, all resident, as kernels read them.

    They take `nbytes`, or more for a few large experts.
    """
    if encoding == "bf16":
        return random_layer(hidden, inner, max(2 * TOP_K, nbytes // (6 * hidden * inner)))
    parts: dict[str, torch.Tensor] = {}
    for name, shape in (("gate_up_proj", (2 * inner, hidden)), ("down_proj", (hidden, inner))):
        parts |= encoded_matrix(encoding, name, *shape)
    sizes = [(name, tuple(t.shape), str(t.dtype)[6:]) for name, t in parts.items()]
    encodings = dict.fromkeys(("gate_up_proj", "down_proj"), encoding)
    layout = SlotLayout.pack(sizes, encodings, "bfloat16")
    if kernels in panel_order.KERNELS:
        layout = panel_order.layout_in_panels(layout)
    count = max(2 * TOP_K, nbytes // layout.nbytes)
    slots = HostSlots(count, layout.nbytes)
    for slot in range(count):
        for name, tensor in parts.items():
            spec, data = layout[name], tensor.view(torch.uint8).numpy().reshape(-1)
            target = slots.bytes(slot)[spec.offset :][: spec.nbytes]
            if spec.panels:
                row_bytes = spec.nbytes // spec.shape[0]
                panel_order.Panels().arrange(spec.panels, data, 0, target, row_bytes)
            else:
                target[:] = data
    return LayerExperts(SwiGLUExperts(count), layout, slots, Recipe())


def encoded_matrix(encoding: str, name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Random codes [rows, ...] of an encoding, and small equal scales."""
    inputs, nbytes = BLOCKS[encoding]
    if encoding == "bf12":
        return bf12_matrix(name, rows, columns)
    codes = torch.randint(0, 255, (rows, columns // inputs * nbytes), dtype=torch.uint8)
    blocks = codes.view(-1, nbytes)
    for at in HALVES.get(encoding, ()):
        blocks[:, at : at + 2] = torch.tensor([1e-3]).half().view(torch.uint8)
    if encoding == "gguf_mxfp4":
        blocks[:, 0] = 120
    if encoding == "gguf_nvfp4":
        blocks[:, :4] = 40
    if encoding == "iq1_m":  # a quarter of its scale is in each of these half bytes
        blocks[:, 49::2] = blocks[:, 49::2] % 16 + 16
    if encoding in (*GGML, *DECODED):
        return {name: codes}
    if encoding == "mxfp4":
        return {name: codes, f"{name}.scale": torch.full((rows, columns // 32), 120).byte()}
    if encoding == "fp8":
        scale = torch.full((rows // 128, columns // 128), 1e-3)
        return {name: codes.clamp(max=126).view(torch.float8_e4m3fn), f"{name}.scale": scale}
    group, kind = (64, torch.int8) if encoding == "int8" else (32, torch.uint8)
    scale = torch.full((rows, columns // group), 1.25e-3).half()
    return {name: codes.view(kind), f"{name}.scale": scale}


def bf12_matrix(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """A matrix of normal weights in bf12."""
    bits = torch.randn(rows, columns).mul(0.02).bfloat16().view(torch.int16).numpy().view("u2")
    parts = {
        name: torch.empty(rows, columns // 2 * 3, dtype=torch.uint8),
        f"{name}.ends": torch.empty(rows, 1, dtype=torch.int32),
        f"{name}.exponents": torch.empty(1, 16, dtype=torch.uint8),
        f"{name}.escapes": torch.empty(1, escape_room(rows, columns), dtype=torch.int32),
    }
    assert bf12(bits, *(part.numpy() for part in parts.values()))
    return parts


def encoded_rows(clock: Clock, only: list[str], sizes: list[int]) -> None:
    """Print the seconds per expert in each encoding, compared with bf16 and with memory.

    The measurements take turns: the floor, then each encoding by each kernel, then all again.
    """
    now = clock.now
    print(
        f"{'encoded experts':24}{'tokens':>7}{'kernel':>11}{'us/expert':>11}{'x bf16':>8}", end=""
    )
    print(f"{'GB/s':>7}{'floor':>7}{'ratio':>7}")
    for hidden, inner in ENCODED_SHAPES[:1] if clock.quick else ENCODED_SHAPES:
        names = ["bf16", *(name for name in STORED if name in only or not only)]
        cases = [("bf16", "native"), *((n, k) for n in names[1:] for k in ENCODED_KERNELS)]
        of = {(name, kind): encoded_layer(name, hidden, inner, kind) for name, kind in cases}
        for tokens in sizes:
            x, weights = (
                torch.randn(tokens, hidden).bfloat16(),
                torch.ones(tokens, TOP_K).bfloat16(),
            )
            times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
            floors: list[float] = []
            for turn in range(
                -1, 24 if tokens == 1 and not clock.quick else 3
            ):  # the first is not counted
                start = now()
                _READ.sum()
                floors.append(_READ.nbytes / (now() - start))
                for name, chosen in cases:
                    experts = of[name, chosen]
                    first = TOP_K * (turn + 1) % (experts.num_experts - TOP_K + 1)
                    index = torch.arange(first, first + TOP_K).expand(tokens, -1).contiguous()
                    start = now()
                    compute_step(KERNELS_OF[chosen], experts, x, index, weights)
                    if turn >= 0:
                        times[name, chosen].append((now() - start) / TOP_K)
            floor = float(np.median(floors))
            plain = float(np.median(times["bf16", "native"]))
            for (name, chosen), seconds_of_row in times.items():
                each = float(np.median(seconds_of_row))
                speed = of[name, chosen].layout.nbytes / each
                print(f"{f'{name} {hidden}x{inner}':24}{tokens:7}{chosen:>11}", end="")
                print(f"{each * 1e6:11.1f}{plain / each:8.2f}", end="")
                print(f"{speed / 1e9:7.1f}{floor / 1e9:7.1f}{speed / floor:7.2f}", flush=True)


def dense_rows(clock: Clock) -> None:
    """Print the speed of nn.Linear for one token, by torch and by the native kernel."""
    print(f"\n{'linear, one token':22}{'torch GB/s':>12}{'native GB/s':>12}{'floor':>8}")
    for rows, columns in ((1024, 1024), (4096, 1024), (32000, 1024)):
        count = max(2, (96 << 20) // (rows * columns * 2))
        make = lambda: nn.Linear(columns, rows, bias=False).bfloat16()  # noqa: E731, B023
        model, x = nn.ModuleList(make() for _ in range(count)), torch.randn(1, columns).bfloat16()
        size, floor = count * rows * columns * 2, clock.floor()
        before = clock.best(lambda: [m(x) for m in model], 0.4)  # noqa: B023
        done = accelerate(model)
        after = clock.best(lambda: [m(x) for m in model], 0.4)  # noqa: B023
        done.detach()
        print(f"{f'{rows}x{columns}':22}{size / before / 1e9:12.1f}", end="")
        print(f"{size / after / 1e9:12.1f}{floor / 1e9:8.1f}")


def call_rows(clock: Clock) -> None:
    """Print the microseconds of a kernel call with almost nothing to compute."""
    experts, chosen = random_layer(64, 64, EXPERTS), make_kernel("native")
    x, index = torch.randn(1, 64).bfloat16(), torch.arange(TOP_K)[None]
    weights = torch.ones(1, TOP_K).bfloat16()
    routing = Routing.of(index.numpy(), EXPERTS)
    state, ids = chosen.begin(experts, x, routing, weights), list(range(TOP_K))
    dense = nn.Linear(64, 64, bias=False).bfloat16()
    calls = {
        "routing": lambda: Routing.of(index.numpy(), EXPERTS),
        "begin": lambda: chosen.begin(experts, x, routing, weights),
        "group, eight experts": lambda: chosen.compute_group(state, ids, ids),
        "combine": lambda: chosen.combine(state),
        "torch's F.linear": lambda: linear(x, dense.weight),
        "native linear": lambda: dense.forward(x),
    }
    accelerate(dense)
    print(f"\n{'call':22}{'microseconds':>14}")
    for name, call in calls.items():
        loop = lambda: [call() for _ in range(200)]  # noqa: E731, B023
        print(f"{name:22}{clock.best(loop, 0.3) / 200 * 1e6:14.1f}")


def options() -> SimpleNamespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--encodings", nargs="*", metavar="NAME", help="encoded experts instead: all, or these"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--wall", action="store_true", help="wall time; always with two threads")
    parser.add_argument("--quick", action="store_true", help="one shape, few runs: a dry run")
    return SimpleNamespace(**vars(parser.parse_args()))


@torch.no_grad()
def main() -> None:
    chosen = options()
    torch.manual_seed(0)
    torch.set_num_threads(chosen.threads)
    clock = Clock(chosen.wall or chosen.threads > 1, chosen.quick)
    if chosen.encodings is not None:
        encoded_rows(clock, chosen.encodings, chosen.tokens)
    else:
        expert_rows(clock)
        dense_rows(clock)
        call_rows(clock)


if __name__ == "__main__":
    main()
