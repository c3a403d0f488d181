"""Statistics of a run, as `model.greenroom.stats()` gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Stats(Mapping[str, Any]):
    """Counts since the last reset; also a mapping of its fields.

    `capacity` is in slots; `expert_requests` counts one a distinct expert of each step; bytes are
    those that experts have on disk; `stall_s` is time spent waiting with nothing to compute.
    `budget_bytes` is None where the cache was sized alone.
    """

    policy: str
    kernels: str
    capacity: int
    experts: int
    slot_bytes: int
    passes: int
    expert_requests: int
    expert_hits: int
    hit_ratio: float
    bytes_read: int
    stall_s: float
    peak_rss_bytes: int
    budget_bytes: int | None

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))
