"""How a model is held in memory."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.config.amounts import Amount
from greenroom.config.option import check_choices, option
from greenroom.config.tables import check_policy, check_predictor
from greenroom.config.values import (
    CO_COMPUTE,
    KERNELS,
    KV,
    LOW_SHARE,
    PRECISIONS,
    devices_of,
    scope_of,
    share_of,
    split_of,
    thresholds_of,
)
from greenroom.errors import UsageError


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How a model is held in memory."""

    memory: str | int | None = option(
        None,
        "budget of the whole process, on a GPU of its memory: 8GiB, 60%% of what is available, or"
        " auto (the default)",
        "SIZE",
    )
    host_memory: str | int | None = option(
        None, "with a GPU, budget of the process in host memory, where experts wait too: 16GiB,"
        " 60%% of what is available, or auto (the default)", "SIZE",
    )  # fmt: skip
    cache: str | int | None = option(
        None, "size of the expert cache alone: 25%% of the experts, or 2GiB", "SIZE"
    )
    policy: str = option("auto", "who is evicted: auto, lru, llru, moe-infinity, ...", "NAME")
    scope: str = option(
        "shared", "one cache for all layers, one a layer of equal size, or sizes as the numbers"
        " (one a layer) or the file of `greenroom trace budgets` say",
        "shared|per-layer|N,N,...|FILE",
    )  # fmt: skip
    pin: str | None = option(
        None, "keep the experts of a task, as the file of `greenroom trace hot` says; of several"
        " tasks those of the one nearest to each prompt", "FILE",
    )  # fmt: skip
    split: str = option(
        "off", "of packed experts keep a top part and fetch the rest when it is needed: a share of"
        " the expert as 0.5, or those of each layer as numbers or the file of `greenroom trace"
        " budgets` say; auto sets budgets and shares by what earlier runs recorded (MoEpic's"
        " Algorithm 1)", "off|auto|SHARE|N,N,...|FILE",
    )  # fmt: skip
    miss_precision: str = option(
        "off", "serve misses of small gate weight from the low-precision copies of a pack that has"
        " them (pack --miss-precision): faster, but THE OUTPUT CHANGES, and depends on what the"
        " cache holds", None, PRECISIONS,
    )  # fmt: skip
    low_below: float | None = option(
        None, "with --miss-precision: misses of experts that, with all smaller ones of the token,"
        " have less than this share of its gate weights (default: 0.4, which is HOBBIT's T1 = 0.6)",
        "SHARE",
    )  # fmt: skip
    low_share: str = option(
        LOW_SHARE, "with --miss-precision: share of the cache's memory that copies have", "SHARE"
    )
    low_follow: bool = option(
        False, "with --miss-precision: the exact expert follows a copy that was used, while the"
        " link is idle, so that more is exact; tokens take longer",
    )  # fmt: skip
    skip_below: float = option(
        0.0, "leave out misses below this share of the gate weights, which changes the output:"
        " HOBBIT's T2 = 0.9 is 0.1 (default: none)", "SHARE",
    )  # fmt: skip
    substitute_below: float = option(
        0.0, "replace misses below this share of the gate weights by the expert that is there and"
        " was most often chosen with them, which changes the output (default: none)", "SHARE",
    )  # fmt: skip
    prefetch: str = option(
        "auto", "fetch experts before they are asked for, by a predictor: auto, off, next-gate,"
        " learned, markov, ...; a distance in layers may follow, as next-gate:2", "NAME[:D]"
    )  # fmt: skip
    predictor: str | None = option(
        None, "the file of `greenroom train-predictor`, for the predictor learned", "FILE"
    )
    no_guard: bool = option(False, "prefetch also where that is slower")
    co_compute: str = option(
        "off", "with a GPU, have the host's processor compute experts that are missing there, where"
        " that is sooner than to move them; answers may then differ in their last bits from run to"
        " run, by what was in the cache", None, CO_COMPUTE,
    )  # fmt: skip
    kernels: str = option("auto", "what computes the experts", None, KERNELS)
    device: str = option(
        "auto", "where the experts are computed; over several GPUs, as cuda:0,cuda:1, they are"
        " spread", "auto|cpu|cuda[:N][,cuda:N...]|fake",
    )  # fmt: skip
    context: int = option(4096, "tokens that the KV cache must have room for", "N")
    kv: str = option(
        "dynamic", "how keys and values are kept: dynamic as they are computed; fp8, int4, int2"
        " quantised, which changes the output (int4 and int2 need optimum-quanto); offloaded with"
        " a GPU in host memory", None, KV,
    )  # fmt: skip
    readers: int = option(2, "threads that read experts", "N")
    direct: str = option("auto", "read past the page cache (O_DIRECT)", None,
                          ("auto", "on", "off"))  # fmt: skip
    read_limit: str | int | None = option(
        None, "read experts no faster than so many bytes a second, as from a slower disk", "SIZE"
    )
    dtype: str = option("auto", "compute in this type instead of the checkpoint's", None,
                         ("auto", "bfloat16", "float16", "float32"))  # fmt: skip
    threads: int | None = option(None, "threads that compute (all cores by default)", "N")

    def __post_init__(self) -> None:
        if self.memory is not None and self.cache is not None:
            raise UsageError("--memory and --cache exclude each other: give one of them")
        if self.memory not in (None, "auto"):
            Amount.parse(self.memory, "--memory")
        if self.host_memory not in (None, "auto"):
            Amount.parse(self.host_memory, "--host-memory")
        if self.host_memory is not None and self.device == "cpu":
            raise UsageError(
                "--host-memory is for --device cuda: on a CPU, --memory is all there is"
            )
        if self.cache is not None:
            Amount.parse(self.cache, "--cache")
        limit = self.read_limit
        if limit is not None and Amount.parse(limit, "--read-limit").nbytes is None:
            raise UsageError(f"--read-limit is bytes a second, as 50MB: {limit!r}")
        for name in ("context", "readers"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads must be at least 1, got {self.threads}")
        check_policy(self.policy)
        check_predictor(self.prefetch)
        devices_of(self.device)
        scope_of(self.scope)
        split_of(self.split)
        check_choices(self)
        thresholds_of(self.miss_precision, self.low_below, self.skip_below, self.substitute_below)
        share_of(self.low_share, "--low-share")
        if self.miss_precision == "off" and self.low_share != LOW_SHARE:
            raise UsageError("--low-share is for --miss-precision, which is off: give both")
        if self.miss_precision == "off" and self.low_follow:
            raise UsageError("--low-follow is for --miss-precision, which is off: give both")
        if self.miss_precision != "off" and self.split != "off":
            raise UsageError("--miss-precision and --split exclude each other: give one of them")
