"""Options of loading a model: memory, expert cache, prefetching, machine."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.amounts import Amount, bytes_check
from greenroom.config.tables import check_policy, check_predictor
from greenroom.config.values import KERNELS, KV, parse_device
from greenroom.core.config.scheduler import SchedulerConfig
from greenroom.errors import UsageError
from greenroom.option import CACHE, MACHINE, MEMORY, PREFETCHING, at_least, option


def budget(value: str | int, name: str) -> None:
    if value != "auto":
        Amount.parse(value, name)


@dataclass(frozen=True)
class LoadConfig(SchedulerConfig):
    """Options of loading a model: memory, expert cache, prefetching, machine."""

    memory: str | int | None = option(
        None,
        "memory that the process may use (with a GPU: GPU memory): 8GiB, 60%% of the available"
        " memory, or auto (the default)", "SIZE", group=MEMORY, check=budget, shown=True,
    )  # fmt: skip
    host_memory: str | int | None = option(
        None, "with a GPU, main memory that the process may use, also for experts: 16GiB, 60%% of"
        " the available memory, or auto (the default)", "SIZE", group=MEMORY, check=budget,
    )  # fmt: skip
    cache: str | int | None = option(
        None, "size of the expert cache only, in place of --memory: 25%% of the experts, or"
        " 2GiB", "SIZE",
        group=MEMORY, check=Amount.parse, shown=True,
    )  # fmt: skip
    policy: str = option(
        "auto", "eviction policy of the expert cache: auto, lru, llru, moe-infinity, ...", "NAME",
        group=CACHE, check=lambda value, name: check_policy(value),
    )  # fmt: skip
    pin: str | None = option(
        None, "never evict the experts in this file, made by `greenroom trace hot`; with several"
        " tasks in it, the experts of the task nearest to each prompt", "FILE", group=CACHE,
    )  # fmt: skip
    prefetch: str = option(
        "auto", "load experts before they are needed, by this predictor: auto, off, next-gate,"
        " learned, markov, ...; how many layers ahead may follow, as next-gate:2", "NAME[:D]",
        group=PREFETCHING, check=lambda value, name: check_predictor(value),
    )  # fmt: skip
    predictor: str | None = option(
        None, "file made by `greenroom train-predictor`, for --prefetch learned", "FILE",
        group=PREFETCHING,
    )  # fmt: skip
    no_guard: bool = option(False, "prefetch even where it makes answers slower", group=PREFETCHING)
    kernels: str = option(
        "auto", "implementation that computes the experts", None, KERNELS, group=MACHINE
    )
    device: str = option(
        "auto", "processor that computes the experts; several GPUs, as cuda:0,cuda:1, share"
        " them", "auto|cpu|cuda[:N][,cuda:N...]|fake",
        group=MACHINE, check=lambda value, name: parse_device(value), shown=True,
    )  # fmt: skip
    context: int = option(
        4096, "longest prompt and answer together, in tokens", "N",
        group=MEMORY, check=at_least(1), shown=True,
    )  # fmt: skip
    kv: str = option(
        "dynamic", "storage of the KV cache: dynamic as computed; fp8, int4, int2 quantised,"
        " which changes the output (int4 and int2 need optimum-quanto); offloaded in main"
        " memory, with a GPU",
        None, KV, group=MEMORY,
    )  # fmt: skip
    readers: int = option(
        2, "threads that read experts from disk", "N", group=MACHINE, check=at_least(1)
    )
    direct: str = option(
        "auto",
        "read experts without the system's page cache (O_DIRECT)",
        None,
        ("auto", "on", "off"),
        group=MACHINE,
    )
    read_limit: str | int | None = option(
        None, "read at most this many bytes a second, as from a slower disk: 50MB", "SIZE",
        group=MACHINE, check=bytes_check("bytes a second, as 50MB"),
    )  # fmt: skip
    dtype: str = option(
        "auto", "data type to compute in, instead of the checkpoint's", None,
        ("auto", "bfloat16", "float16", "float32"), group=MACHINE,
    )  # fmt: skip
    threads: int | None = option(
        None, "threads that compute (default: all cores)", "N", group=MACHINE, check=at_least(1)
    )

    def __post_init__(self) -> None:
        if self.memory is not None and self.cache is not None:
            raise UsageError("--memory and --cache exclude each other: use one of them")
        SchedulerConfig.__post_init__(self)
        if self.host_memory is not None and self.device == "cpu":
            raise UsageError("--host-memory needs --device cuda: on a CPU, use --memory")
