"""Synthetic traces of expert routing: by a Zipf distribution, or by topics of requests."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.config import SynthConfig, TopicsConfig, ZipfConfig
from greenroom.trace.trace import Trace, starts_of

Floats = NDArray[np.float64]
_KEEP = 1e6  # added to a score: more than any draw


def zipf(options: ZipfConfig) -> Trace:
    """Make a synthetic trace with experts drawn independently by a Zipf distribution.

    These are the traces of the paper on layered paging (LLRU), section 5.1. Equal options give
    equal traces.
    """
    random = np.random.default_rng(options.seed)
    chance = -options.a * np.log(np.arange(1, options.experts + 1) + options.b)
    experts = _empty(options)
    for token in range(0, options.tokens, 1024):
        block = experts[token : token + 1024]
        scores = chance + random.gumbel(size=(*block.shape[:2], options.experts))
        block[:] = _best(scores, options.top_k)
    return _trace("zipf", options, experts, ["zipf"] * options.requests)


def topics(options: TopicsConfig) -> Trace:
    """Make a synthetic trace whose requests prefer the experts of their topics.

    A token also reuses each expert of the token before with a probability (`stickiness`). Equal
    options give equal traces.
    """
    random = np.random.default_rng(options.seed)
    size = (options.topics, options.layers, options.experts)
    tastes = random.normal(size=size)
    experts, labels = _empty(options), []
    starts = _request_starts(options)
    for begin, end in pairwise(starts.tolist()):
        topic = int(random.integers(options.topics))
        labels.append(f"topic-{topic}")
        _sticky(experts[begin:end], options.skew * tastes[topic], options.stickiness, random)
        # The two factors keep the variance of tastes constant.
        drift = options.drift
        tastes = np.sqrt(1 - drift) * tastes + np.sqrt(drift) * random.normal(size=size)
    return _trace("topics", options, experts, labels)


def _sticky(
    rows: NDArray[Any], taste: Floats, stickiness: float, random: np.random.Generator
) -> None:
    """Draw the experts of a synthetic request's tokens, one token after another.

    `rows` [tokens, layers, top_k] is filled with experts, `taste` [layers, experts] are logits, and
    `stickiness` is the probability that a token reuses an expert of the token before.
    """
    layers = np.arange(len(taste))[:, None]
    for token, row in enumerate(rows):
        scores = taste + random.gumbel(size=taste.shape)
        if token:
            before = rows[token - 1]
            scores[layers, before] += _KEEP * (random.random(before.shape) < stickiness)
        row[:] = _best(scores, row.shape[-1])


def _best(scores: Floats, top_k: int) -> NDArray[np.int64]:
    """Return the indices of the `top_k` highest scores on the last axis, highest first.

    If scores are logits with Gumbel noise, this draws experts without replacement, with the
    probabilities of the softmax.
    """
    order: NDArray[np.int64] = np.argsort(-scores, axis=-1)[..., :top_k]
    return order


def _empty(options: SynthConfig) -> NDArray[Any]:
    kind = np.uint8 if options.experts <= 1 << 8 else np.uint16
    return np.empty((options.tokens, options.layers, options.top_k), kind)


def _request_starts(options: SynthConfig) -> NDArray[np.int64]:
    return np.arange(options.requests + 1, dtype=np.int64) * options.tokens // options.requests


def _trace(kind: str, options: SynthConfig, experts: NDArray[Any], labels: list[str]) -> Trace:
    requests, prompt = _request_starts(options), options.prompt_tokens
    begins = np.ones(options.tokens, np.bool_)
    prefill = np.zeros(options.tokens, np.bool_)
    for begin in requests[:-1].tolist():
        begins[begin + 1 : begin + prompt] = False
        prefill[begin : begin + prompt] = True
    passes = np.flatnonzero(begins)
    return Trace(
        experts=experts,
        experts_per_layer=np.full(options.layers, options.experts, np.int64),
        request_starts=requests,
        pass_starts=starts_of(np.diff(np.append(passes, options.tokens))),
        pass_prefill=prefill[passes],
        labels=tuple(labels),
        meta={"model": f"synthetic {kind}", **asdict(options)},
    )
