"""Models whose tokens are graphs, and counts of what these do; a CPU in the GPU's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from greenroom.hf.attach.token_attention import MARK
from greenroom.runtime.cuda.piece_graph import PieceGraph
from greenroom.runtime.cuda.token_graph import TokenGraph
from tests.hf.memory.test_device import ids, placed
from tests.recorded_graphs import RecordedGraphs

PROMPT, TOKENS = 5, 6


def placed_lru(name: str, monkeypatch: Any, capacity: int, engine: Any = None, **parts: Any) -> Any:
    engine = engine or RecordedGraphs(monkeypatch)
    parts = {"kernels": "triton", "capacity": capacity, "policy": "lru", **parts}
    return placed(name, monkeypatch, engine, **parts)


def tokens_of(model: Any, cache: Any, count: int, **options: Any) -> list[torch.Tensor]:
    """The logits of tokens that follow what a KV cache has, one pass each."""
    return [
        model(token[None], past_key_values=cache, use_cache=True, **options).logits
        for token in ids(count, 1)
    ]


def prompt(model: Any, tokens: int = PROMPT) -> Any:
    return model(ids(1, tokens), use_cache=True).past_key_values


def replayed(model: Any, cache: Any, replays: list[int]) -> None:
    """Compute tokens until one of them is a graph, since nothing is missing any more."""
    for _ in range(20):
        if replays:
            return
        tokens_of(model, cache, 1)
    pytest.fail("no token was a graph")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of graphs' replays, one for each."""
    replays, replay = list[int](), TokenGraph.replay

    def counting(self: TokenGraph, decode: Any) -> Any:
        replays.append(self._number + 1)
        return replay(self, decode)

    monkeypatch.setattr(TokenGraph, "replay", counting)
    return replays


def pieced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of times that each pass in pieces has served its layers."""
    served, replay = list[int](), PieceGraph.replay

    def counting(self: PieceGraph, decode: Any) -> Any:
        result = replay(self, decode)
        served.append(len(self.moe_layers))
        return result

    monkeypatch.setattr(PieceGraph, "replay", counting)
    return served


def observed(bindings: Any) -> list[tuple[int, list[int]]]:
    """The choices of routers that observers hear of from now on: (layer, experts)."""
    seen: list[tuple[int, list[int]]] = []

    def observe(layer: int, experts: Any) -> None:
        seen.append((layer, experts.tolist()))

    for binding in bindings:
        object.__setattr__(binding, "on_routing", observe)
    return seen


def marks_of(model: Any) -> list[Any]:
    """The attention in place of the model's own, of each layer."""
    return [vars(module)[MARK] for module in model.modules() if MARK in vars(module)]
