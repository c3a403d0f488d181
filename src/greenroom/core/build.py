"""Build a scheduler with its options: the table of options, in the order in which they plan."""

from __future__ import annotations

from typing import Any

from greenroom.core.options.cocompute import CoCompute
from greenroom.core.options.precision import FollowedPrecision, Precision, Thresholds
from greenroom.core.options.rules.rates import Rates
from greenroom.core.pieces import Pieces
from greenroom.core.plan import Option
from greenroom.core.policy import Policy
from greenroom.core.scheduler.scheduler import Scheduler
from greenroom.errors import UsageError


def build_scheduler(
    pieces: Pieces,
    capacity: int,
    policy: Policy,
    *,
    thresholds: Thresholds | None = None,
    rates: Rates | None = None,
    **settings: Any,
) -> Scheduler:
    """A scheduler; `settings` are those of `Scheduler`.

    thresholds: misses of low gate weight may be approximated
    rates:      misses may be computed on the host
    """
    options: list[Option] = []
    if thresholds is not None and thresholds.most:
        kind = FollowedPrecision if thresholds.follow else Precision
        options.append(kind(thresholds, pieces))
    if rates is not None:
        if settings.get("host") is None:
            raise UsageError("co-compute needs experts in host memory: give it slots there")
        options.append(CoCompute(rates))
    return Scheduler(pieces, capacity, policy, options=options, **settings)
