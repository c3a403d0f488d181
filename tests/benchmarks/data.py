"""Tiny inputs for the smoke tests: published recordings, and a substitute for llama-bench.

Recordings have the demo model's shape (8 layers of 32 experts, top-4), so that every script can
replay them: scripts that simulate, and scripts that force a model's routing.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from greenroom.config import TopicsConfig
from greenroom.trace import load, save
from greenroom.trace.synth import topics
from greenroom.trace.trace import GateInputs, Prediction

# The names that the papers' scripts look for.
MODELS = ("olmoe-1b-7b", "gpt-oss-20b", "deepseek-v2-lite", "mixtral-8x7b")
LAYERS, EXPERTS, TOP_K = 8, 32, 4
TOKENS = 66  # of a request: some scripts take requests of 64 and more only
REQUESTS = 88  # of two kinds; the last 40 are a predictor's lessons in replays
LLAMA_COMPLETION = """#!{python}
import sys
version = "version: 1 (made up)\\n"
times = "prompt eval time = 2.5 ms / 8 tokens\\neval time = 6.0 ms / 3 runs\\n"
times = "generate: n_ctx = 4096\\n" + times
sys.stderr.write(version if "--version" in sys.argv else times)
"""
LLAMA_BENCH = """#!{python}
import json, sys
options = dict(zip(sys.argv[1:], sys.argv[2:]))
repeats = int(options["-r"])
rows = [(int(options["-p"]), 0), (0, int(options["-n"]))]
print(json.dumps([{{"n_prompt": p, "samples_ns": [10**8] * repeats}} for p, _ in rows]))
"""


def write_recording(path: Path, seed: int, *, prefill: bool = False, ids: bool = True) -> None:
    """A synthetic recording as an npz, with labels, gate weights and token ids."""
    config = TopicsConfig(
        layers=LAYERS, experts=EXPERTS, top_k=TOP_K, tokens=REQUESTS * TOKENS, requests=REQUESTS,
        topics=2, seed=seed,
    )  # fmt: skip
    trace = topics(config)
    random = np.random.default_rng(seed)
    gates = np.sort(random.dirichlet(np.ones(TOP_K), (trace.tokens, LAYERS)))[..., ::-1]
    arrays = {
        "experts": trace.experts,
        "offsets": trace.request_starts,
        "labels": np.array(["ab"[r // 2 % 2] for r in range(REQUESTS)]),
        "phase": "prefill" if prefill else "decode",
        "meta": json.dumps({"experts_per_layer": EXPERTS, "model": path.stem}),
        "weights": gates.astype(np.float16),
    }
    if ids:
        arrays["token_ids"] = random.integers(0, 300, trace.tokens, np.int32)
    np.savez(path, **arrays)


def write_recordings(folder: Path) -> None:
    """Write a recording for each name of MODELS.

    As in the published ones, one is of prompts, and only the first has token ids. `own.trace` is
    the first one with norms of outputs, as `greenroom trace record` writes them.
    """
    for seed, name in enumerate(MODELS):
        prefill = name.startswith("deepseek")
        write_recording(folder / f"{name}.npz", seed, prefill=prefill, ids=seed == 0)
    write_norms(folder / f"{MODELS[0]}.npz", folder / "own.trace")


def write_norms(recording: Path, path: Path) -> None:
    """Write a recording as a trace that also has norms of outputs and changes of tokens."""
    trace, random = load(recording), np.random.default_rng(0)
    norms = random.random(trace.experts.shape).astype(np.float32)
    changes = random.random(trace.experts.shape[:2]).astype(np.float32)
    save(replace(trace, output_norms=norms, token_changes=changes), path)


def write_inputs(path: Path) -> None:
    """A recording with the inputs of every second token's routers, and their predictions."""
    config = TopicsConfig(
        layers=LAYERS, experts=EXPERTS, top_k=TOP_K, tokens=100, requests=2, topics=2, seed=0
    )
    values = np.random.default_rng(0).standard_normal((50, LAYERS, 16), np.float32)
    inputs, trace = GateInputs(np.arange(0, 100, 2), values), topics(config)
    predictions = {"next-gate": Prediction(trace.experts[::-1], 1)}
    save(replace(trace, gate_inputs=inputs, predictions=predictions), path)


def write_llama_bench(path: Path) -> None:
    """A program that answers llama-bench's command line with made-up times."""
    path.write_text(LLAMA_BENCH.format(python=sys.executable))
    path.chmod(0o755)


def write_llama_completion(path: Path) -> None:
    """A program that prints made-up times as llama-completion does."""
    path.write_text(LLAMA_COMPLETION.format(python=sys.executable))
    path.chmod(0o755)
