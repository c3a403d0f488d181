"""Checks of the settings that a scheduler is built with."""

from __future__ import annotations

from collections.abc import Sequence

from greenroom.core.pieces import Pieces
from greenroom.core.plan import Option
from greenroom.errors import UsageError


def check_settings(pieces: Pieces, pin: str, ahead: int, options: Sequence[Option]) -> None:
    """Check a scheduler's settings; UsageError if settings exclude each other."""
    if ahead and pin != "step":
        raise UsageError(f"prefetching (--prefetch) needs --pin step, got --pin {pin}")
    if any(o.uses_host for o in options):
        for name, parts in (("--split", pieces.split), ("--miss-precision", pieces.copies)):
            if parts is not None:
                raise UsageError(
                    f"--co-compute auto and {name} exclude each other: use one of them"
                )
