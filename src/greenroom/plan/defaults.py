"""Default settings of a run: those stored for its model and machine, or a quick plan."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import date

from greenroom.errors import OutputError
from greenroom.plan.history import files
from greenroom.plan.history.recent import recent_trace
from greenroom.plan.history.records import StoredSetting
from greenroom.plan.quick import quick_plan
from greenroom.plan.workload import decoded_tokens, has_enough_tokens, synthetic_trace

log = logging.getLogger(__name__)


def default_setting(
    fingerprint: str, machine: str, sizes: Sequence[int], top_k: int, slots: int, device: str
) -> StoredSetting | None:
    """Return the stored setting for a similar cache capacity, or a new quick plan.

    A setting that `greenroom tune` or `greenroom plan` stored is always taken. A quick plan is
    stored too, and made again once there are twice as many recorded tokens. `sizes` are the numbers
    of experts of the layers, `slots` is the cache capacity. Returns None if GREENROOM_LEARNED is
    off, or if the slots cannot hold the experts that a token uses in one layer.
    """
    stored = files.load_records(fingerprint, machine).nearest(slots, device)
    if (stored is not None and stored.by != "quick") or not files.is_enabled():
        return stored
    recent = recent_trace(files.load_routing(fingerprint), sizes)
    tokens = decoded_tokens(recent) if recent is not None and has_enough_tokens(recent) else 0
    # A quick plan is repeated once there are twice as many recorded tokens.
    if stored is not None and (not tokens or tokens < 2 * stored.tokens):
        return stored
    trace = recent if recent is not None and tokens else synthetic_trace(sizes, top_k)
    if slots < max(top_k, trace.top_k):
        return None
    chosen = quick_plan(trace, slots)
    entry = StoredSetting(
        slots, chosen.setting.options(), "quick", chosen.misses, max(chosen.lru_misses, 1e-9),
        date.today().isoformat(), device, tokens,
    )  # fmt: skip
    try:
        files.update_records(fingerprint, machine, lambda records: records.with_setting(entry))
    except OutputError as error:
        log.warning(
            "the settings chosen for this run could not be stored for later runs: %s", error
        )
    return entry
