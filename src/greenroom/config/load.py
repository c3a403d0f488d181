"""Options of loading a model: memory, expert cache, prefetching, machine."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.amounts import Amount, bytes_check, parse_memory
from greenroom.config.tables import check_policy, check_predictor
from greenroom.config.values import KERNELS, KV, PREDICT_IN, parse_adapters, parse_device
from greenroom.core.config.base import AUTO
from greenroom.core.config.scheduler import TAU, SchedulerConfig
from greenroom.errors import UsageError
from greenroom.option import CACHE, INEXACT, MACHINE, MEMORY, PREFETCHING, at_least, option, within


def budget(value: str | int, name: str) -> None:
    """Check a memory budget: bytes, a share, or `auto`. UsageError if invalid."""
    if value != "auto":
        parse_memory(value, name)


def table_size(value: str | int, name: str) -> None:
    """Check the least size of a table on disk: bytes, or `off`. UsageError if invalid."""
    if value != "off":
        bytes_check("a number of bytes, as 64MiB, or off")(value, name)


def block_size(value: str | int, name: str) -> None:
    """Check the size of a prompt's blocks: a number of tokens, or `auto`. UsageError if invalid."""
    if value == "auto":
        return
    if not str(value).isdecimal():
        raise UsageError(f"{name} must be a number of tokens or auto, got {value}")
    within(64, 8192)(int(value), name)


@dataclass(frozen=True)
class LoadConfig(SchedulerConfig):
    """Options of loading a model: memory, expert cache, prefetching, machine."""

    memory: str | int | None = option(
        None,
        "memory that the process may use; if a GPU computes: memory of the GPU. Write bytes as"
        " 8GiB, a share of the free memory as 60%%, or auto (the default: 80%% of it)", "SIZE",
        group=MEMORY, check=budget, shown=True,
    )  # fmt: skip
    host_memory: str | int | None = option(
        None, "if a GPU computes: main memory that the process may use, also to cache experts."
        " Write bytes as 16GiB, a share of the free memory as 60%%, or auto (the default: 80%% of"
        " it)", "SIZE", group=MEMORY, check=budget,
    )  # fmt: skip
    cache: str | int | None = option(
        None, "in place of --memory, the size of the expert cache alone: 25%% of the experts, or"
        " 2GiB", "SIZE", group=MEMORY, check=Amount.parse, shown=True,
    )  # fmt: skip
    pressure: str = option(
        "auto", "give slots back while other processes need memory, and take them again afterwards:"
        " on, off; auto: on, unless --cache sets the size of the cache", None,
        ("auto", "on", "off"), group=MEMORY,
    )  # fmt: skip
    policy: str = option(
        "auto", "eviction policy of the expert cache: auto, lru, llru, moe-infinity, ...", "NAME",
        group=CACHE, check=lambda value, name: check_policy(value),
    )  # fmt: skip
    pin: str | None = option(
        None, "never evict the experts that this file lists, made by `greenroom trace hot`; if it"
        " lists several tasks: those of the task whose use of experts is most like the prompt's",
        "FILE", group=CACHE,
    )  # fmt: skip
    prefetch: str = option(
        "auto", "load experts before they are needed, by this predictor: auto, off, next-gate,"
        " learned, markov, ...; with :D, it looks D layers ahead, as next-gate:2", "NAME[:D]",
        group=PREFETCHING, check=lambda value, name: check_predictor(value),
    )  # fmt: skip
    predictor: str | None = option(
        None, "file made by `greenroom train-predictor`, for --prefetch learned", "FILE",
        group=PREFETCHING,
    )  # fmt: skip
    no_guard: bool = option(
        False, "prefetch always; without this, prefetching pauses while it makes answers slower",
        group=PREFETCHING,
    )  # fmt: skip
    predict_in: str = option(
        "auto", "thread that runs the predictor: worker is a thread of its own, inline is the one"
        " that computes; auto: worker for learned with a GPU", None, PREDICT_IN, group=PREFETCHING,
    )  # fmt: skip
    kernels: str = option(
        "auto", "implementation of the experts' computation: native is C++ for the CPU,"
        " precise is native with inputs of 15 bits, not 8, for GGUF's types, rounded is native with"
        " weights rounded as transformers rounds them, triton is for GPUs,"
        " and eager has the bits of transformers' eager experts but is slower; auto is native or"
        " triton",
        None, KERNELS, group=MACHINE,
    )  # fmt: skip
    device: str = option(
        "auto", "processor that computes: auto is a GPU if there is one. Several GPUs, as"
        " cuda:0,cuda:1, divide the experts among them; fake is for tests",
        "auto|cpu|cuda[:N][,cuda:N...]|fake",
        group=MACHINE, check=lambda value, name: parse_device(value), shown=True,
    )  # fmt: skip
    spare_devices: int = option(
        0, "how many of the GPUs in --device, counted from the last, have no experts at first;"
        " they can be added while the model runs", "N", group=MACHINE, check=at_least(0),
    )  # fmt: skip
    context: int = option(
        4096, "longest prompt and answer together, in tokens; at most the model's own limit", "N",
        group=MEMORY, check=at_least(1), shown=True,
    )  # fmt: skip
    kv: str = option(
        "dynamic", "form of the KV cache: dynamic is as computed; int8 and int4 are quantised, in"
        " about a half and a third of the memory, which changes the output; offloaded keeps a"
        " GPU's KV cache in main memory",
        None, KV, group=MEMORY,
    )  # fmt: skip
    prompt_block: str | int = option(
        "auto", "tokens of a prompt that a forward pass computes while no answer is generated. A"
        " larger block reads missing experts fewer times and takes more memory; it may change last"
        " bits. auto: 512 on a CPU; 2048 to 8192 on a GPU, by its memory", "N|auto",
        group=MEMORY, check=block_size,
    )  # fmt: skip
    disk_tables: str | int = option(
        "64MiB", "leave input embeddings of at least this size on disk, and read the rows of a"
        " prompt's tokens; off: keep all in memory", "SIZE|off",
        group=MEMORY, check=table_size,
    )  # fmt: skip
    readers: int = option(
        4, "threads that read experts from disk", "N", group=MACHINE, check=at_least(1)
    )
    direct: str = option(
        "auto",
        "read experts past the system's page cache (O_DIRECT); auto: where the disk allows it",
        None,
        ("auto", "on", "off"),
        group=MACHINE,
    )
    read_limit: str | int | None = option(
        None, "read at most this many bytes a second, to imitate a slower disk: 50MB", "SIZE",
        group=MACHINE, check=bytes_check("bytes a second, as 50MB"),
    )  # fmt: skip
    repack: str | None = option(
        None, "read experts from a copy of the model in this folder, in which each expert is one"
        " range of a file; the copy is made if it is missing", "DIR", group=MACHINE,
    )  # fmt: skip
    dtype: str = option(
        "auto", "data type to compute in; auto: the checkpoint's", None,
        ("auto", "bfloat16", "float16", "float32"), group=MACHINE,
    )  # fmt: skip
    config: str | None = option(
        None, "of a GGUF file: the original model's config.json, or the folder or hub id that has"
        " it, with the tokenizer (default: beside the file, or as its metadata say)", "MODEL",
        group=MACHINE,
    )  # fmt: skip
    adapter: str | tuple[str, ...] | None = option(
        None, "folder with changed experts of the model (an adapter, as ESFT trains it), which"
        " replace the model's own; `greenroom serve` and `greenroom batch` take several, and"
        " answer each request by the model or the adapter that it names", "[NAME=]DIR",
        group=MACHINE, check=lambda value, name: parse_adapters(value),
    )  # fmt: skip
    only_experts: str | None = option(
        None, "leave out all experts but those that this file of one task lists, made by `greenroom"
        " trace hot`; routers choose among the others. This changes the output", "FILE",
        group=INEXACT,
    )  # fmt: skip
    threads: int | None = option(
        None,
        "threads that compute on the CPU (default: one for each core)",
        "N",
        group=MACHINE,
        check=at_least(1),
    )

    def __post_init__(self) -> None:
        if self.memory is not None and self.cache is not None:
            raise UsageError("--memory and --cache exclude each other: use one of them")
        SchedulerConfig.__post_init__(self)
        if self.tau != TAU and self.split != "auto":
            raise UsageError(
                f"--tau has an effect only with --split auto, got --split {self.split}: give"
                " --split auto, or leave out --tau"
            )
        if self.adapter is not None and self.repack is not None:
            raise UsageError(
                "--repack reads experts from a copy of the model, which has none of --adapter's:"
                " leave out one of them"
            )
        if self.adapter is not None and self.only_experts is not None:
            raise UsageError("--only-experts and --adapter exclude each other: give one of them")
        if self.only_experts is not None and self.repack is not None:
            raise UsageError(
                "--repack copies all experts, and --only-experts leaves some out: leave out one of"
                " them, or make a pack with `greenroom pack --keep`"
            )
        if self.spare_devices >= len(parse_device(self.device)[1]) and self.spare_devices:
            raise UsageError(
                f"--spare-devices {self.spare_devices}: --device {self.device} must name more GPUs"
            )
        if self.device_placement != AUTO and len(parse_device(self.device)[1]) < 2:
            raise UsageError(
                f"--device-placement {self.device_placement} needs several GPUs: name them in"
                " --device, as cuda:0,cuda:1"
            )
        if self.host_memory is not None and self.device == "cpu":
            raise UsageError(
                "--host-memory is for a GPU, but --device is cpu: use --memory alone, or"
                " --device cuda"
            )
