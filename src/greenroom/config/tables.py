"""Names of policies, predictors and systems, known before anything that has them is imported.

Importing the policies imports Numba. tests/config/test_tables.py holds these against them.
"""

from __future__ import annotations

from greenroom.errors import UnknownName, UsageError

POLICIES = (
    "auto", "lru", "fifo", "lfu", "lfu-in-cache", "random", "marking", "llru", "lcp",
    "moe-infinity", "s3fifo", "sieve", "arc", "lfuda", "hobbit", "hybrimoe", "fate", "next-use",
)  # fmt: skip
PREDICTORS = (
    "auto", "off", "none", "popularity", "token", "markov", "eamc", "routing-path", "next-gate",
    "learned", "pregated",
)  # fmt: skip
# Papers' systems, which put our own parts together.
SYSTEMS = (
    "mixtral-offloading", "adapmoe", "moe-infinity", "promoe", "moepic", "pre-gated", "hobbit",
    "fate", "hybrimoe", "fiddler", "llru", "static", "greenroom",
)  # fmt: skip
# They look into the rest of a trace: a run has none.
TRACE_POLICIES = ("opt", "static")
TRACE_PREDICTORS = ("recorded", "oracle", "noisy-oracle")


def check_policy(text: str) -> None:
    """UnknownName or UsageError for a policy that a run cannot have; options are checked later."""
    name = text.partition(":")[0]
    if name in TRACE_POLICIES:
        raise UsageError(
            f"policy {name} must know the whole trace beforehand: it runs in `greenroom simulate`"
            " only"
        )
    if name not in POLICIES:
        raise UnknownName("policy", name, POLICIES)


def check_predictor(text: str) -> None:
    """UnknownName or UsageError for a predictor that a run cannot have; options are checked
    later."""
    name = text.partition(":")[0]
    if name in TRACE_PREDICTORS:
        raise UsageError(
            f"predictor {name} runs where a trace is replayed only, in `greenroom simulate`"
        )
    if name not in PREDICTORS:
        raise UnknownName("predictor", name, PREDICTORS)
