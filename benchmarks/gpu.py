"""What the CUDA tier costs: a token against its floor, the link, the kernels, where time goes.

    python benchmarks/gpu.py [--layers 8] [--trace RECORDING] [--shapes olmoe qwen3-30b-a3b]
    python benchmarks/gpu.py --fake      # the same code on a CPU and tiny shapes: no figures

Needs this repository, torch with CUDA, transformers, and 0.84 (olmoe) or 1.2 GB (qwen3-30b-a3b) of
disk and of host memory a layer; weights are random and made on the spot. Routing is a recording's,
or without one a synthetic trace's (`greenroom trace synth topics`), forced upon the routers. The
floor of a token is max(compute, bytes / link): what it takes with every expert resident, and what
its missing experts take at the rate of one plain copy from pinned memory. All misses are served
from host memory, which has read every expert before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent / "replay"))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from forced import Routing, forced, prepared
from safetensors.torch import save_file

from greenroom.config import TopicsConfig, show_bytes
from greenroom.core.layout import SlotLayout
from greenroom.hf import places
from greenroom.hf.attach import Greenroom
from greenroom.hf.build import Draft
from greenroom.hf.parts import Parts
from greenroom.policies import choose
from greenroom.runtime import forward
from greenroom.runtime.cuda.engine import Host
from greenroom.runtime.cuda.slots import DeviceSlots
from greenroom.runtime.kernels import LayerExperts, Recipe, kernel
from greenroom.runtime.kernels import Routing as StepRouting
from greenroom.runtime.measure_kernels import Experts
from greenroom.trace import Trace, load
from greenroom.trace.synth import topics

RESIDENT = (0.125, 0.25, 0.5)
PROMPT, WARM, TOKENS = 16, 40, 60  # tokens of a request: read at once, not timed, timed


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; `heads` are those of queries, and of keys and values."""

    kind: str
    architecture: str
    hidden: int
    inner: int
    experts: int
    top_k: int
    heads: tuple[int, int]
    head_dim: int
    vocabulary: int = 8192


SHAPES = {
    "olmoe": Shape("olmoe", "OlmoeForCausalLM", 2048, 1024, 64, 8, (16, 16), 128),
    "qwen3-30b-a3b": Shape("qwen3_moe", "Qwen3MoeForCausalLM", 2048, 768, 128, 8, (32, 4), 128),
}
TINY = {
    "olmoe": Shape("olmoe", "OlmoeForCausalLM", 64, 64, 8, 2, (4, 4), 16, 256),
    "qwen3-30b-a3b": Shape("qwen3_moe", "Qwen3MoeForCausalLM", 64, 64, 8, 2, (4, 2), 16, 256),
}


def checkpoint(folder: Path, shape: Shape, layers: int) -> Path:
    """A checkpoint of random weights; all layers have the same, which no time depends on."""
    config = {
        "architectures": [shape.architecture], "model_type": shape.kind,
        "hidden_size": shape.hidden, "num_hidden_layers": layers, "vocab_size": shape.vocabulary,
        "num_attention_heads": shape.heads[0], "num_key_value_heads": shape.heads[1],
        "head_dim": shape.head_dim, "intermediate_size": shape.inner,
        "moe_intermediate_size": shape.inner, "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k, "norm_topk_prob": False, "dtype": "bfloat16",
        "tie_word_embeddings": False, "max_position_embeddings": 4096, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))

    def random(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.bfloat16).uniform_(-0.03, 0.03)

    wide, narrow = (n * shape.head_dim for n in shape.heads)
    norm = shape.head_dim if shape.kind == "qwen3_moe" else wide
    layer = {
        "self_attn.q_proj": random(wide, shape.hidden),
        "self_attn.o_proj": random(shape.hidden, wide),
        "self_attn.k_proj": random(narrow, shape.hidden),
        "self_attn.v_proj": random(narrow, shape.hidden),
        "self_attn.q_norm": random(norm), "mlp.gate": random(shape.experts, shape.hidden),
        "self_attn.k_norm": random(shape.head_dim if shape.kind == "qwen3_moe" else narrow),
        "input_layernorm": random(shape.hidden), "post_attention_layernorm": random(shape.hidden),
    }  # fmt: skip
    for expert in range(shape.experts):
        layer[f"mlp.experts.{expert}.gate_proj"] = random(shape.inner, shape.hidden)
        layer[f"mlp.experts.{expert}.up_proj"] = random(shape.inner, shape.hidden)
        layer[f"mlp.experts.{expert}.down_proj"] = random(shape.hidden, shape.inner)
    files = {}
    for number in range(layers):
        named = {f"model.layers.{number}.{name}.weight": t for name, t in layer.items()}
        save_file(named, folder / f"layer-{number}.safetensors")
        files |= dict.fromkeys(named, f"layer-{number}.safetensors")
    rest = {
        "model.embed_tokens.weight": random(shape.vocabulary, shape.hidden),
        "lm_head.weight": random(shape.vocabulary, shape.hidden),
        "model.norm.weight": random(shape.hidden),
    }
    save_file(rest, folder / "rest.safetensors")
    files |= dict.fromkeys(rest, "rest.safetensors")
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


class Bench:
    """One model on the device; `attach` gives it a cache of so many experts."""

    def __init__(self, folder: Path, shape: Shape, layers: int, fake: bool) -> None:
        self.shape, self.fake = shape, fake
        self.device = torch.device("cpu" if fake else "cuda")
        draft = Draft.of(folder)
        self.catalog = draft.catalog
        self.model: Any = draft.load(self.device)
        self.layers = layers

    def sync(self) -> None:
        if not self.fake:
            torch.cuda.synchronize()

    @contextmanager
    def attached(self, resident: float) -> Iterator[Greenroom]:
        """A cache of this share of the experts, all of them in host memory."""
        experts = self.catalog.experts
        capacity = max(1, int(experts * resident))
        parts = Parts(
            self.catalog, capacity, policy=choose("auto", capacity, experts).name, cuda=True,
            kernels="eager" if self.fake else "auto", host_capacity=experts, host_policy="lru",
        )  # fmt: skip
        greenroom = self.model.greenroom = Greenroom(self.model, parts)
        try:
            greenroom.compile()
            for layer in range(self.layers):  # from disk, once
                greenroom.driver.step(layer, np.arange(self.shape.experts), lambda *_: None)
            yield greenroom
        finally:
            greenroom.detach()

    def token_times(self, greenroom: Greenroom, trace: Trace) -> tuple[list[float], Any]:
        """(seconds of each timed token, statistics over them) of the trace's first request."""
        with forced(self.model, trace) as routing:
            for name in ("_experts", "_weights", "_ids"):
                setattr(routing, name, getattr(routing, name).to(self.device))
            self._pass(routing, 0)
            for token in range(1, WARM):
                self._pass(routing, token)
            greenroom.reset_stats()
            times = [self._pass(routing, token) for token in range(WARM, WARM + TOKENS)]
        return times, greenroom.stats()

    @torch.inference_mode()
    def _pass(self, routing: Routing, number: int) -> float:
        """Seconds of a pass, until its next token is known to the host."""
        first, last = routing.trace.pass_starts[number : number + 2].tolist()
        if number == 0:
            routing._cache = None
        routing._now = slice(first, last)
        start = time.perf_counter()
        out = self.model(
            routing._ids[None, first:last], past_key_values=routing._cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        out.logits.argmax().item()
        routing._cache = out.past_key_values
        return time.perf_counter() - start


@contextmanager
def clocked(greenroom: Greenroom) -> Iterator[dict[str, float]]:
    """Seconds that the host spends in each part of the experts forward."""
    spent = dict.fromkeys(("ids", "launches"), 0.0)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                spent[name] += time.perf_counter() - start

        return wrapped

    before, chosen = forward.to_host, greenroom.kernel
    forward.to_host = timed("ids", before)
    for name in ("begin", "wave", "combine"):
        setattr(chosen, name, timed("launches", getattr(chosen, name)))
    try:
        yield spent
    finally:
        forward.to_host = before
        for name in ("begin", "wave", "combine"):
            delattr(chosen, name)


def requests(shape: Shape, layers: int, recording: Path | None) -> Trace:
    """One request of a prompt and decoded tokens, a pass each."""
    length = PROMPT + WARM + TOKENS
    if recording is not None:
        whole = prepared(load(recording), layers, shape.vocabulary)
        longest = int(np.argmax(np.diff(whole.request_starts)))
        trace = whole.select([longest])
        if trace.tokens < length or trace.top_k != shape.top_k:
            raise SystemExit(f"{recording}: no request of {length} tokens and top-{shape.top_k}")
    else:
        options = TopicsConfig(
            layers=layers, experts=shape.experts, top_k=shape.top_k, tokens=length, requests=1,
            topics=1,
        )  # fmt: skip
        trace = prepared(topics(options), layers, shape.vocabulary)
    lengths = [PROMPT, *[1] * (length - PROMPT)]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    flags = np.array([True, *[False] * (length - PROMPT)])
    return replace(
        trace.head(length), pass_starts=starts.astype(trace.pass_starts.dtype), pass_prefill=flags
    )


def plain_copy(device: torch.device, nbytes: int) -> float:
    """Bytes a second of one copy from pinned memory, as large as it may be."""
    cuda = device.type == "cuda"
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return nbytes / statistics.median(times[1:])


def tier_copy(bench: Bench, greenroom: Greenroom) -> float:
    """Bytes a second of experts that come from host memory, by the tier's own chunks and lanes."""
    driver, start = greenroom.driver, time.perf_counter()
    before = driver.meter.links[1].nbytes
    for layer in range(bench.layers):
        driver.step(layer, np.arange(bench.shape.experts), lambda *_: None)
    bench.sync()
    return (driver.meter.links[1].nbytes - before) / (time.perf_counter() - start)


def model_rows(name: str, shape: Shape, args: argparse.Namespace) -> None:
    """TPOT against its floor, and where a token's time goes, at every share of residents."""
    trace = requests(shape, args.layers, args.trace)
    with tempfile.TemporaryDirectory(dir=args.root) as folder:
        bench = Bench(checkpoint(Path(folder), shape, args.layers), shape, args.layers, args.fake)
        size = bench.catalog.expert_bytes / bench.catalog.experts
        rate = plain_copy(bench.device, 1 << (20 if args.fake else 29))
        with bench.attached(1.0) as whole:
            compute = statistics.median(bench.token_times(whole, trace)[0])
        print(f"\n{name}: {args.layers} layers, {show_bytes(size)} an expert")
        print(
            f"plain pinned copy {rate / 1e9:.1f} GB/s, all resident {compute * 1e3:.2f} ms a token"
        )
        print("| resident | TPOT ms | compute | bytes / link | TPOT / floor | hits | tier GB/s"
              " | ids ms | launches | stalls | rest |")  # fmt: skip
        print("|" + " --: |" * 11)
        for share in RESIDENT:
            with bench.attached(share) as part, clocked(part) as spent:
                speed = tier_copy(bench, part)
                for name_ in spent:
                    spent[name_] = 0.0
                times, stats = bench.token_times(part, trace)
            moved = stats.links[1]["bytes"] / TOKENS / rate
            tpot = statistics.median(times)
            passes = WARM + TOKENS  # what is clocked
            parts = [spent["ids"] / passes, spent["launches"] / passes, stats.stall_s / TOKENS]
            cells = [
                f"{share:.1%}", *(f"{s * 1e3:.2f}" for s in (tpot, compute, moved)),
                f"{tpot / max(compute, moved):.2f}", f"{stats.hit_ratio:.1%}", f"{speed / 1e9:.1f}",
                *(f"{s * 1e3:.2f}" for s in (*parts, statistics.fmean(times) - sum(parts))),
            ]  # fmt: skip
            print("| " + " | ".join(cells) + " |", flush=True)


def layout_of(shape: Shape, encoding: str) -> SlotLayout:
    """An expert's slot in an encoding of Greenroom's own, or as it is."""
    matrices = {"gate_up_proj": (2 * shape.inner, shape.hidden),
                "down_proj": (shape.hidden, shape.inner)}  # fmt: skip
    if encoding == "plain":
        return SlotLayout.pack([(n, s, "bfloat16") for n, s in matrices.items()])
    codes = {"int8": (1, "int8"), "int4": (2, "uint8"), "mxfp4": (2, "uint8")}[encoding]
    group, scale = {"int8": (64, "float16"), "int4": (32, "float16"), "mxfp4": (32, "uint8")}[
        encoding
    ]
    tensors = []
    for n, (rows, columns) in matrices.items():
        tensors.append((n, (rows, columns // codes[0]), codes[1]))
        tensors.append((f"{n}.scale", (rows, columns // group), scale))
    return SlotLayout.pack(tensors, dict.fromkeys(matrices, encoding), "bfloat16")


@torch.inference_mode()
def kernel_rows(name: str, shape: Shape, args: argparse.Namespace) -> None:
    """Experts a second of the kernels, everything in slots, against reading device memory."""
    engine = places.engine_for(Parts(None, 1, cuda=True))  # type: ignore[arg-type]
    chosen = kernel("eager" if args.fake else "triton")
    device, bfloat16 = engine.device, torch.bfloat16
    big = torch.ones(1 << (16 if args.fake else 28), device=device)
    floor = big.nbytes / seconds(big.sum, device)
    print(f"\n{name}, kernels; device memory is read at {floor / 1e9:.0f} GB/s")
    print("| encoding | tokens | ms a step | experts/s | GB/s |\n| :-- | --: | --: | --: | --: |")
    for encoding in ("plain", "int8", "int4", "mxfp4"):
        layout = layout_of(shape, encoding)
        slots = DeviceSlots(engine, shape.experts, layout.nbytes, shape.experts)
        for slot in range(shape.experts):
            slots.bytes(slot).fill_(0x11)
        layer = LayerExperts(Experts(shape.experts), layout, slots, Recipe())
        for tokens in (1, 16) if args.fake else (1, 16, 512):
            index = torch.rand(32, tokens, shape.experts).topk(shape.top_k).indices
            routings = [StepRouting.of(i.numpy(), shape.experts) for i in index]
            x = torch.randn(tokens, shape.hidden, device=device).to(bfloat16)
            weights = torch.rand(tokens, shape.top_k, device=device).to(bfloat16)
            turn = iter(range(1 << 30))

            def one() -> None:
                routing = routings[next(turn) % 32]  # noqa: B023
                step = chosen.begin(layer, x, routing, weights)  # noqa: B023
                ids = routing.experts.tolist()
                chosen.wave(step, ids, ids)
                chosen.combine(step)

            took, used = (
                seconds(one, device, 3 if args.fake else 30),
                np.mean([r.experts.size for r in routings]),
            )
            print(f"| {encoding} | {tokens} | {took * 1e3:.3f} | {used / took:,.0f}"
                  f" | {used * layout.nbytes / took / 1e9:.0f} |", flush=True)  # fmt: skip


def seconds(work: Callable[[], object], device: torch.device, times: int = 30) -> float:
    """Of a call, as part of many whose end is waited for."""
    for _ in range(3):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--trace", type=Path, help="a recording of the model's routing")
    parser.add_argument("--root", type=Path, help="where there is disk for the weights")
    parser.add_argument("--fake", action="store_true", help="a dry run on a CPU, tiny")
    args = parser.parse_args()
    if not args.fake and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --fake is a dry run")
    if args.fake:
        args.layers = min(args.layers, 2)
        torch.set_num_threads(1)  # tiny shapes: threads would wait for one another
    else:
        print(torch.cuda.get_device_name(), torch.__version__)
    with patch.object(places, "engine_for", lambda _: Host()) if args.fake else nullcontext():
        for name in args.shapes:
            shape = (TINY if args.fake else SHAPES)[name]
            kernel_rows(name, shape, args)
            model_rows(name, shape, args)


if __name__ == "__main__":
    main()
