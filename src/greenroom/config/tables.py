"""Names of eviction policies, predictors and systems, without importing their modules.

The modules of the policies import Numba, which takes long. tests/config/test_tables.py compares
these names with those that the modules define.
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
# Systems of papers, built from Greenroom's policies, predictors and other parts.
SYSTEMS = (
    "mixtral-offloading", "adapmoe", "moe-infinity", "promoe", "moepic", "pre-gated",
    "expertflow", "hobbit", "fate", "hybrimoe", "fiddler", "llru", "static", "greenroom",
)  # fmt: skip
# These need the rest of a trace, which a run does not have.
TRACE_POLICIES = ("opt", "static")
TRACE_PREDICTORS = ("recorded", "oracle", "noisy-oracle")


def check_policy(text: str) -> None:
    """Check that a run can use the eviction policy `NAME[:options]`, or raise UsageError.

    Only the name is checked here.
    """
    name = text.partition(":")[0]
    if name in TRACE_POLICIES:
        raise UsageError(
            f"policy {name} needs the entire trace in advance, so it works only in"
            " `greenroom simulate`"
        )
    if name not in POLICIES:
        raise UnknownName("policy", name, POLICIES)


def check_predictor(text: str) -> None:
    """Check that a run can use the predictor `NAME[:options]`, or raise UsageError.

    Only the name is checked here.
    """
    name = text.partition(":")[0]
    if name in TRACE_PREDICTORS:
        raise UsageError(
            f"predictor {name} needs a recorded trace, so it works only in `greenroom simulate`"
        )
    if name not in PREDICTORS:
        raise UnknownName("predictor", name, PREDICTORS)
