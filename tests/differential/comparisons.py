"""What is compared with what. Each comparison takes a seed and returns how much it compared.

COMPARISONS["policies"](seed)      # {"differential/lru steps": 3000, ...}; AssertionError
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch

from greenroom.core.cache.cache import Cache
from greenroom.core.cache.scope import split_capacity
from greenroom.core.layout import BLOCKS
from greenroom.policies import policy
from greenroom.runtime.encodings import ENCODINGS
from greenroom.sim.replay import replay
from greenroom.trace import load
from greenroom.trace.orders import stream
from tests.faults.scenarios import command
from tests.ggml_blocks import GGML, random_bytes, sane_scales
from tests.models import cached_tiny, tiny
from tests.policies import reference
from tests.policies.streams import LAYERS, OFFSETS, as_stream, tokens
from tests.policies.test_reference import PIECES, VARIANTS, served
from tests.runtime.encodings.test_decode import ggml, same
from tests.server.rig import Sampling, Served, draw

Counts = dict[str, int]
WEIGHTS = 1 << 18  # of each type, at a time
TOKENS = 200  # of a stream, for each policy
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, seed=5),
    Sampling(temperature=0.5, top_p=0.9, top_k=20, repetition_penalty=1.05, seed=6),
)


def compare_gguf(seed: int) -> Counts:
    """Every GGUF type of random blocks with gguf's own decoder, in three types of numbers."""
    random, counts = np.random.default_rng(seed), {}
    for name in GGML:
        block = BLOCKS[name][0]
        blocks = random_bytes(name, WEIGHTS // block, random)
        if seed % 2:
            sane_scales(name, blocks, random)
        with np.errstate(all="ignore"):
            expected = torch.from_numpy(gguf.dequantize(blocks, ggml(name)))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            got = ENCODINGS[name].decode([torch.from_numpy(blocks)], expected.shape, dtype)
            assert same(got, expected.to(dtype)), (name, dtype)
        counts[f"differential/{name} weights"] = expected.numel()
    return counts


def compare_policies(seed: int) -> Counts:
    """Every policy, compiled, with its plain reference: in a run and in a replay."""
    chance, counts = Random(seed), {}
    for name in VARIANTS:
        steps = tokens(chance.getrandbits(32), TOKENS, *(chance.random() < 0.5 for _ in range(3)))
        scope, pin = chance.choice(("shared", "per-layer")), chance.choice(("step", "none"))
        capacity = chance.randint(LAYERS, OFFSETS[-1])
        chosen, requests = policy(name), as_stream(steps)
        sizes = split_capacity(capacity, LAYERS, scope)
        expected = reference.serve(
            name.partition(":")[0], chosen.settings, steps, OFFSETS, sizes, pin
        )
        where = (name, scope, pin, capacity)
        cache = Cache(PIECES, capacity, chosen, scope, trace=requests)
        assert served(cache, steps, pin) == expected, where
        done = replay(requests, OFFSETS, capacity, chosen, scope=scope, pin=pin, detail=True)
        assert done.missed.tolist() == [not hit for hit, _ in expected], where
        counts[f"differential/{name} steps"] = len(steps)
    return counts


def compare_simulator(seed: int) -> Counts:
    """Hits of a run with those of the simulator over its recording, for a random model."""
    chance = Random(seed)
    experts = chance.choice((4, 8, 12))
    shape = {
        "num_hidden_layers": chance.randint(2, 4),
        "num_experts": experts,
        "num_experts_per_tok": chance.randint(1, min(4, experts)),
    }
    name = chance.choice(("lru", "llru", "lfu", "fifo", "arc", "s3fifo", "hybrimoe", "next-use"))
    options = ("--cache", f"{chance.randint(20, 90)}%", "--policy", name, "--max-new-tokens", 12,
               "--temperature", 0, "--prefetch", "off", "--raw")  # fmt: skip
    with TemporaryDirectory(prefix="differential-") as folder:
        model, out, prompt = (Path(folder) / each for each in ("model", "t", "p.txt"))
        tiny("qwen3_moe", model, tokenizer=True, **shape)
        prompt.write_text("The green room is where the performers wait")
        ran = json.loads(command("run", model, prompt.read_text(), *options, "--json"))
        command("trace", "record", model, "--prompts", prompt, "-o", out, *options)
        trace = load(out)
    found = replay(stream(trace, "runtime"), trace.offsets, ran["capacity"], policy(name))
    expected = ran["expert_requests"], ran["expert_requests"] - ran["expert_hits"]
    assert (found.requests, found.misses) == expected, (shape, options)
    return {"differential/simulator requests": found.requests}


def compare_answers(seed: int) -> Counts:
    """Answers together, with drafts and reused prefixes, with those of each request alone."""
    chance = Random(seed)
    folder = cached_tiny("qwen3_moe", tokenizer=True, dtype="bfloat16", hidden_size=64, head_dim=16)
    beginnings = [draw(chance.randint(5, 60), seed + each) for each in range(2)]
    asked: list[tuple[list[int], int, Any]] = []
    for number in range(6):
        prompt = chance.choice(beginnings) * chance.randint(1, 2) + draw(number, seed + number)
        asked.append((prompt, chance.randint(1, 24), chance.choice(SAMPLINGS)))
    exact: dict[str, Any] = {"batch_invariant": True, "prefill_chunk": 16}
    with closing(
        Served(folder, capacity=chance.randint(4, 12), speculate="lookup", max_batch=4, **exact)
    ) as served_together:
        recorders = [
            served_together.ask(prompt, new, sampling=sampling, top_logprobs=2)
            for prompt, new, sampling in asked
        ]
        ends = [each.end() for each in recorders]
    alone = Served(folder, capacity=16, max_batch=1, no_prefix_reuse=True, **exact)
    with closing(alone):
        for (prompt, new, sampling), each, end in zip(asked, recorders, ends, strict=True):
            assert end.error is None, end.error
            expected = alone.ask(prompt, new, sampling=sampling, top_logprobs=2)
            expected.end()
            assert each.tokens == expected.tokens, (len(prompt), new, sampling)
    return {"differential/answers": len(asked)}


COMPARISONS: dict[str, Callable[[int], Counts]] = {
    "gguf": compare_gguf,
    "policies": compare_policies,
    "simulator": compare_simulator,
    "answers": compare_answers,
}
