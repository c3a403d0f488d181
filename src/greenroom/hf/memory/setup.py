"""All that was decided about how a model is served: options, sizes, devices."""

from __future__ import annotations

from dataclasses import dataclass, field

from greenroom.core.cache.pins import Pins
from greenroom.core.cache.scope import Scope
from greenroom.core.config.base import Approximation
from greenroom.core.config.scheduler import NO_OPTIONS, SchedulerConfig
from greenroom.core.layout import Catalog
from greenroom.core.pieces import Copies, Split
from greenroom.hf.checkpoint.source import ModelSource
from greenroom.hf.kv.sizes import KVBytes


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """All that was decided about a model; `fake` uses the device that poisons stale slots, behind a
    second link.

    On a GPU (`cuda`) the slots are in its memory, and `host_capacity` experts are kept in host
    memory between them and the disk, by `host_policy`; so they are behind the fake device.
    """

    catalog: Catalog
    capacity: int
    policy: str = "auto"
    scope: Scope = "shared"
    split: Split | None = None  # how experts are cut, as the catalog's pieces are
    copies: Copies | None = None  # in low precision, which the catalog must have
    watch: bool = False  # record what the next run's split and budgets are set by
    pins: Pins | None = None  # experts of tasks that stay
    prefetch: str = "off"
    predictor: str | None = None  # the file of `learned`
    guard: bool = True
    fingerprint: str = ""  # of the checkpoint
    chosen: str = ""  # where policy, scope and prefetch come from, if neither user nor defaults
    remember: bool = False  # begin with what earlier runs learned, and leave it to the next
    kernels: str = "auto"
    fake: bool = False
    cuda: bool = False
    devices: tuple[int, ...] = (0,)  # their numbers; experts are spread over several
    host_capacity: int = 0
    host_policy: str = "auto"
    config: SchedulerConfig = NO_OPTIONS  # the options of the scheduler
    readers: int = 2
    direct: str = "auto"
    read_limit: int | None = None  # bytes a second
    seed: int = 0  # of the policy, and of when experts arrive on the fake device
    budget_bytes: int | None = None  # of the memory that the slots are in
    host_bytes: int | None = None  # budget of host memory, where that is another one
    context: int = 0  # tokens that the KV cache has room for
    keys_values: KVBytes = field(default_factory=lambda: KVBytes(()))  # of a request
    source: ModelSource | None = None  # the checkpoint, where all experts can be read again

    @property
    def approximation(self) -> Approximation | None:
        """What misses may be served with instead of their exact experts."""
        return self.config.approximation()
