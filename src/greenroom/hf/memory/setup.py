"""Setup of a model's run: options, sizes and devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from greenroom.core.cache.pins import Pins
from greenroom.core.cache.scope import Scope
from greenroom.core.config.base import Approximation
from greenroom.core.config.scheduler import NO_OPTIONS, SchedulerConfig
from greenroom.core.home_devices import SPREAD, DevicePlacement
from greenroom.core.layout import Catalog
from greenroom.core.pieces import Copies, Split
from greenroom.hf.checkpoint.source import ModelSource
from greenroom.hf.kv.cache import ROOM
from greenroom.hf.kv.sizes import KVBytes
from greenroom.hf.variants.catalog import ExpertVariants
from greenroom.hf.variants.subset import ExpertSubset


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """Setup of one model's run: options, sizes and devices.

    With `cuda`, the `capacity` expert slots are in GPU memory, and up to `host_capacity` further
    experts are cached in host memory, with the eviction policy `host_policy`. The `fake` device of
    tests imitates a GPU's slots and transfers in host memory, and overwrites slots that must not be
    read.
    """

    catalog: Catalog
    capacity: int
    policy: str = "auto"
    scope: Scope = "shared"
    split: Split | None = None  # sizes of split experts, as in the catalog
    copies: Copies | None = None  # sizes of low-precision copies, as in the catalog
    counts_split: bool = False  # count decoded tokens for --split auto of the next run
    pins: Pins | None = None  # experts that are pinned, by task
    prefetch: str = "off"
    predictor: str | None = None  # the file of the predictor `learned`
    guard: bool = True
    predict_in: str = "auto"  # the thread that runs the predictor: worker, inline
    fingerprint: str = ""  # of the checkpoint
    settings_origin: str = (
        ""  # origin of policy, scope and prefetch, where they are stored settings
    )
    remember: bool = False  # use what earlier runs learned, and save it for the next
    kernels: str = "auto"
    kernel_fallback: str = ""  # why --kernels auto means eager here
    fake: bool = False
    cuda: bool = False
    devices: tuple[int, ...] = (0,)  # their numbers
    spare_devices: int = 0  # how many of them, the last ones, have no experts at first
    placement: DevicePlacement = SPREAD  # of experts on several devices
    host_capacity: int = 0
    host_policy: str = "auto"
    config: SchedulerConfig = NO_OPTIONS  # the options of the scheduler
    readers: int = 4
    direct: str = "auto"
    read_limit: int | None = None  # bytes a second
    seed: int = 0  # of the policy, and of arrival times on the fake device
    budget_bytes: int | None = None  # of the memory that has the slots
    host_bytes: int | None = None  # budget of host memory behind a GPU
    context: int = 0  # tokens that the KV cache has room for
    prompt_block: int = 512  # most tokens of a prompt that a forward pass computes
    keys_values: KVBytes = field(default_factory=lambda: KVBytes(()))  # of one sequence
    source: ModelSource | None = None  # the checkpoint, which materialize reads again
    variants: ExpertVariants | None = None  # of the experts in the catalog; None: the model alone
    subset: ExpertSubset | None = None  # the experts in the catalog; None: all of the model

    @property
    def router_catalog(self) -> Catalog:
        """Return the catalog with the numbers of experts that the model's routers choose from."""
        return self.catalog if self.variants is None else self.variants.of_model(self.catalog)

    @property
    def active_devices(self) -> int:
        """Return the number of devices that experts are distributed over at first."""
        return len(self.devices) - self.spare_devices

    @property
    def approximation(self) -> Approximation | None:
        """Return the rules that make the output inexact; None if it is the full model's."""
        return self.config.approximation()

    @property
    def approximates_misses(self) -> bool:
        """Return whether a missing expert may be computed inexactly."""
        at = self.approximation
        return at is not None and at.of_misses

    def empty_cache(self, config: Any) -> Any:
        """Return an empty KV cache, of the kind that `--kv` names, for a model's decoder."""
        return self.keys_values.kind.cache(config, self._room, self.cuda)

    def make_growing(self, cache: Any) -> None:
        """Make a KV cache's plain layers grow in place, quantised if `--kv` says so."""
        self.keys_values.kind.make_growing(cache, self._room, self.cuda)

    @property
    def _room(self) -> int:
        """Return the tokens that a KV cache in host memory reserves address space for."""
        return max(self.context, ROOM) + 1
