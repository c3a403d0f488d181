"""Names of eviction policies, predictors and systems, without importing their modules.

Importing the policies imports Numba. tests/config/test_tables.py compares the names.
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
# Systems of papers, built from our parts.
SYSTEMS = (
    "mixtral-offloading", "adapmoe", "moe-infinity", "promoe", "moepic", "pre-gated", "hobbit",
    "fate", "hybrimoe", "fiddler", "llru", "static", "greenroom",
)  # fmt: skip
# These need the rest of a trace, which a run does not have.
TRACE_POLICIES = ("opt", "static")
TRACE_PREDICTORS = ("recorded", "oracle", "noisy-oracle")


def check_policy(text: str) -> None:
    """Check that a run can use a named eviction policy, or raise UsageError.

    The options of the policy are checked later.
    """
    name = text.partition(":")[0]
    if name in TRACE_POLICIES:
        raise UsageError(
            f"policy {name} needs the entire trace in advance: use it with `greenroom simulate`"
        )
    if name not in POLICIES:
        raise UnknownName("policy", name, POLICIES)


def check_predictor(text: str) -> None:
    """Check that a run can use a named expert predictor, or raise UsageError."""
    name = text.partition(":")[0]
    if name in TRACE_PREDICTORS:
        raise UsageError(
            f"predictor {name} needs a recorded trace: use it with `greenroom simulate`"
        )
    if name not in PREDICTORS:
        raise UnknownName("predictor", name, PREDICTORS)
