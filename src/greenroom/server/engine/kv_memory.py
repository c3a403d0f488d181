"""How much memory the keys and values of all requests may take: `--kv-memory`."""

from __future__ import annotations

from typing import Any

from greenroom.config import Amount, ServeConfig, show_bytes
from greenroom.errors import BudgetError

SHARE = 0.25  # of what experts could have, where nothing was said: the rest stays theirs


def kv_limit(greenroom: Any, config: ServeConfig) -> int:
    """In bytes. BudgetError where that is less than a full context takes, or more than there is.

    A request is let in when its keys and values have room at its longest, so that none is ever
    thrown out for want of it.
    """
    one = greenroom.setup.keys_values.total_bytes(greenroom.setup.context)
    slot_budget = greenroom.slot_budget
    if slot_budget is None:  # the cache was sized alone
        most = sized_alone = config.max_batch * one
        budget = None
    else:
        most, budget = slot_budget.max_kv_bytes(), greenroom.setup.budget_bytes
        sized_alone = max(one, min(config.max_batch * one, int(SHARE * most)))
    if config.kv_memory is None:
        return int(sized_alone)
    amount = Amount.parse(config.kv_memory, "--kv-memory")
    if amount.share is not None and budget is None:
        raise BudgetError("--kv-memory is a share of the budget: give --memory, or an amount")
    limit = amount.of(budget or 0)
    if limit < one:
        raise BudgetError(
            f"--kv-memory {config.kv_memory} has no room for one context of"
            f" {greenroom.setup.context} tokens: it takes {show_bytes(one)}; --kv-memory"
            f" {-(-one // (1 << 20))}MiB or a smaller --context would do"
        )
    if slot_budget is not None and limit > most:
        raise BudgetError(
            f"--kv-memory {config.kv_memory}: the budget of {show_bytes(budget or 0)} leaves"
            f" {show_bytes(most)} for keys and values"
        )
    return limit
