"""Requests that are played to a model: a prompt and decoded tokens, or a prompt in blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from forced import prepared
from shapes import Shape

from greenroom.config import TopicsConfig
from greenroom.trace import Trace
from greenroom.trace.synth import topics
from greenroom.trace.trace import starts_of

PROMPT = 16  # tokens that are read at once before any is decoded


def _request(shape: Shape, layers: int, passes: list[int]) -> Trace:
    """One request of these passes, in tokens."""
    options = TopicsConfig(
        layers=layers, experts=shape.experts, top_k=shape.top_k, tokens=sum(passes), requests=1,
        topics=1,
    )  # fmt: skip
    trace = prepared(topics(options), layers, shape.vocabulary)
    return replace(
        trace, pass_starts=starts_of(np.array(passes)), pass_prefill=np.array(passes) > 1
    )


def decoding(shape: Shape, layers: int, passes: int) -> Trace:
    """A request of `passes` passes: a prompt, then one token a pass."""
    return _request(shape, layers, [PROMPT, *[1] * (passes - 1)])


def prefill(shape: Shape, layers: int, tokens: int, block: int) -> Trace:
    """A request with a prompt only, in blocks of `block` tokens."""
    return _request(shape, layers, [block] * (tokens // block))
