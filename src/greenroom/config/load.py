"""How a model is held in memory."""

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
    """How a model is held in memory."""

    memory: str | int | None = option(
        None,
        "budget of the whole process, on a GPU of its memory: 8GiB, 60%% of what is available, or"
        " auto (the default)", "SIZE", group=MEMORY, check=budget, shown=True,
    )  # fmt: skip
    host_memory: str | int | None = option(
        None, "with a GPU, budget of the process in host memory, where experts wait too: 16GiB,"
        " 60%% of what is available, or auto (the default)", "SIZE", group=MEMORY, check=budget,
    )  # fmt: skip
    cache: str | int | None = option(
        None, "size of the expert cache alone: 25%% of the experts, or 2GiB", "SIZE",
        group=MEMORY, check=Amount.parse, shown=True,
    )  # fmt: skip
    policy: str = option(
        "auto", "who is evicted: auto, lru, llru, moe-infinity, ...", "NAME",
        group=CACHE, check=lambda value, name: check_policy(value),
    )  # fmt: skip
    pin: str | None = option(
        None, "keep the experts of a task, as the file of `greenroom trace hot` says; of several"
        " tasks those of the one nearest to each prompt", "FILE", group=CACHE,
    )  # fmt: skip
    prefetch: str = option(
        "auto", "fetch experts before they are asked for, by a predictor: auto, off, next-gate,"
        " learned, markov, ...; a distance in layers may follow, as next-gate:2", "NAME[:D]",
        group=PREFETCHING, check=lambda value, name: check_predictor(value),
    )  # fmt: skip
    predictor: str | None = option(
        None, "the file of `greenroom train-predictor`, for the predictor learned", "FILE",
        group=PREFETCHING,
    )  # fmt: skip
    no_guard: bool = option(False, "prefetch also where that is slower", group=PREFETCHING)
    kernels: str = option("auto", "what computes the experts", None, KERNELS, group=MACHINE)
    device: str = option(
        "auto", "where the experts are computed; over several GPUs, as cuda:0,cuda:1, they are"
        " spread", "auto|cpu|cuda[:N][,cuda:N...]|fake",
        group=MACHINE, check=lambda value, name: parse_device(value), shown=True,
    )  # fmt: skip
    context: int = option(
        4096, "tokens that the KV cache must have room for", "N",
        group=MEMORY, check=at_least(1), shown=True,
    )  # fmt: skip
    kv: str = option(
        "dynamic", "how keys and values are kept: dynamic as they are computed; fp8, int4, int2"
        " quantised, which changes the output (int4 and int2 need optimum-quanto); offloaded with"
        " a GPU in host memory", None, KV, group=MEMORY,
    )  # fmt: skip
    readers: int = option(2, "threads that read experts", "N", group=MACHINE, check=at_least(1))
    direct: str = option(
        "auto", "read past the page cache (O_DIRECT)", None, ("auto", "on", "off"), group=MACHINE
    )
    read_limit: str | int | None = option(
        None, "read experts no faster than so many bytes a second, as from a slower disk", "SIZE",
        group=MACHINE, check=bytes_check("bytes a second, as 50MB"),
    )  # fmt: skip
    dtype: str = option(
        "auto", "compute in this type instead of the checkpoint's", None,
        ("auto", "bfloat16", "float16", "float32"), group=MACHINE,
    )  # fmt: skip
    threads: int | None = option(
        None, "threads that compute (all cores by default)", "N", group=MACHINE, check=at_least(1)
    )

    def __post_init__(self) -> None:
        if self.memory is not None and self.cache is not None:
            raise UsageError("--memory and --cache exclude each other: give one of them")
        SchedulerConfig.__post_init__(self)
        if self.host_memory is not None and self.device == "cpu":
            raise UsageError(
                "--host-memory is for --device cuda: on a CPU, --memory is all there is"
            )
