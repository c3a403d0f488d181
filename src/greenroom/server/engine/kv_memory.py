"""The memory limit of the keys and values of all requests: `--kv-memory`."""

from __future__ import annotations

from typing import Any

from greenroom.config import Amount, ServeConfig, show_bytes
from greenroom.errors import BudgetError

SHARE = 0.25  # default share of the memory that the expert cache could use


def kv_limit(greenroom: Any, config: ServeConfig) -> int:
    """Return the byte limit of all requests' KV caches together, from `--kv-memory`.

    The default limit is enough for `--max-batch` full contexts. If `--memory` is given, it is at
    most a quarter of the memory that the expert cache could use, but at least one full context. A
    request is admitted only if its greatest length fits, so that no request is ever preempted.

    BudgetError if the limit is smaller than one full context, larger than `--memory` allows, or a
    share without `--memory`.
    """
    one = greenroom.setup.keys_values.total_bytes(greenroom.setup.context)
    slot_budget = greenroom.slot_budget
    if slot_budget is None:  # the cache was sized alone
        most = default_bytes = config.max_batch * one
        budget = None
    else:
        most, budget = slot_budget.max_kv_bytes(), greenroom.setup.budget_bytes
        default_bytes = max(one, min(config.max_batch * one, int(SHARE * most)))
    if config.kv_memory is None:
        return int(default_bytes)
    amount = Amount.parse(config.kv_memory, "--kv-memory")
    if amount.share is not None and budget is None:
        raise BudgetError(
            f"--kv-memory {config.kv_memory} is a share of --memory: set --memory too,"
            " or give --kv-memory in bytes (2GiB)"
        )
    limit = amount.of(budget or 0)
    if limit < one:
        raise BudgetError(
            f"--kv-memory {config.kv_memory} is too small for one context of"
            f" {greenroom.setup.context} tokens, which takes {show_bytes(one)}: use --kv-memory"
            f" {-(-one // (1 << 20))}MiB, or a smaller --context"
        )
    if slot_budget is not None and limit > most:
        raise BudgetError(
            f"--kv-memory {config.kv_memory} is too large: --memory {show_bytes(budget or 0)}"
            f" leaves only {show_bytes(most)} for keys and values: use a smaller --kv-memory"
        )
    return limit
