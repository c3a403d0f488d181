"""What an attached model runs on."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.core.layout import Catalog


@dataclass(frozen=True, slots=True)
class Parts:
    """What an attached model runs on; `fake` uses the device that poisons stale slots, behind a
    second link."""

    catalog: Catalog
    capacity: int
    policy: str = "auto"
    scope: str = "shared"
    prefetch: str = "off"
    predictor: str | None = None  # the file of `learned`
    guard: bool = True
    fingerprint: str = ""  # of the checkpoint
    remember: bool = False  # begin with what earlier runs learned, and leave it to the next
    kernels: str = "auto"
    fake: bool = False
    readers: int = 2
    direct: str = "auto"
    read_limit: int | None = None  # bytes a second
    seed: int = 0
    budget_bytes: int | None = None
    context: int = 0  # tokens that the KV cache has room for
    kv_cache_bytes: int = 0  # what they take
