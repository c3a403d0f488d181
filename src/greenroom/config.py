"""Every default and every check, once. The command line takes its defaults and help from here."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from greenroom.errors import BudgetError, UnknownName, UsageError

UNITS = {
    "": 1, "B": 1,
    "K": 1 << 10, "KIB": 1 << 10, "KB": 10**3,
    "M": 1 << 20, "MIB": 1 << 20, "MB": 10**6,
    "G": 1 << 30, "GIB": 1 << 30, "GB": 10**9,
    "T": 1 << 40, "TIB": 1 << 40, "TB": 10**12,
}  # fmt: skip

DEVICES = ("auto", "cpu", "cuda", "fake")
KV = ("dynamic", "fp8", "int4", "int2", "offloaded")
SCOPES = ("shared", "per-layer")
PRECISIONS = ("off", "int8", "int4")  # that misses may be served in
CO_COMPUTE = ("auto", "off")
LOW_SHARE = "12.5%"  # of the cache's memory, for low-precision copies
KERNELS = ("auto", "eager", "numba", "unrounded", "triton")


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of memory: bytes, or a share of something. Exactly one of them is set."""

    nbytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, value: Amount | str | int, what: str) -> Amount:
        """`8GiB`, `500MB`, `60%`, or a number of bytes. `what` names the option in the error."""
        if isinstance(value, Amount):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            if value <= 0:
                raise BudgetError(f"{what} must be more than 0 bytes, got {value}")
            return cls(nbytes=value)
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", str(value))
        if match is None or (match[2] != "%" and match[2].upper() not in UNITS):
            raise UsageError(f"{what} is {value!r}: write bytes as 8GiB or 500MB, a share as 60%")
        number = float(match[1])
        if number <= 0:
            raise BudgetError(f"{what} must be more than 0, got {value!r}")
        if match[2] == "%":
            if number > 100:
                raise UsageError(f"{what} is {value!r}: a share is at most 100%")
            return cls(share=number / 100)
        return cls(nbytes=int(number * UNITS[match[2].upper()]))

    def of(self, whole: int) -> int:
        """In bytes (or whatever `whole` counts), rounded down."""
        if self.share is not None:
            return int(whole * self.share + 1e-9)
        assert self.nbytes is not None
        return self.nbytes


def show_bytes(n: float) -> str:
    """A size for people: 3.2 GiB, 18 MiB."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(n) >= size:
            return f"{n / size:.3g} {unit}" if n < 100 * size else f"{n / size:.0f} {unit}"
    return f"{n:.0f} B"


def devices_of(device: str) -> tuple[str, tuple[int, ...]]:
    """A `--device`: what computes, and the numbers of the devices that do.

    `cuda:0,cuda:2` is ("cuda", (0, 2)), `cuda` the first GPU, `fake,fake` two fake devices.
    UnknownName or UsageError for what is none.
    """
    parts = [part.strip() for part in device.split(",")]
    names, numbers = [], []
    for part in parts:
        name, colon, number = part.partition(":")
        if name not in DEVICES or (colon and name != "cuda"):
            raise UnknownName("device", part, DEVICES)
        if colon and not (number.isascii() and number.isdecimal()):
            raise UsageError(f"--device {device}: GPUs are numbered, as cuda:0 or cuda:1")
        names.append(name)
        numbers.append(int(number or 0))
    if names == ["fake"] * len(parts):
        return "fake", tuple(range(len(parts)))
    if len(parts) > 1 and not all(part.startswith("cuda:") for part in parts):
        raise UsageError(f"--device {device}: several devices are GPUs, as cuda:0,cuda:1")
    if len(set(numbers)) < len(parts):
        raise UsageError(f"--device {device}: each GPU once")
    return names[0], tuple(numbers)


def scope_of(scope: str) -> str | tuple[float, ...]:
    """A `--scope`: a name, or numbers of slots (or shares of them), one a layer.

    They are written as `12,8,8,4`, or are the `slots` of a JSON file, which `greenroom trace
    budgets` writes. UnknownName or UsageError for what is none.
    """
    if scope in SCOPES:
        return scope
    if Path(scope).suffix == ".json" or Path(scope).is_file():
        return _numbers(budgets_file(scope).get("slots"), f"{scope}: slots")
    if not re.fullmatch(r"[\d.,\s]+", scope):
        raise UnknownName("scope", scope, [*SCOPES, "N,N,...", "FILE"])
    return _numbers(scope.split(","), "--scope")


def split_of(split: str) -> float | tuple[float, ...] | str | None:
    """A `--split`: the share of an expert that is its top, for all layers or for each; None: off.

    Written as `0.5` or `0.5,0.4,1`, or the `split` of a JSON file, which `greenroom trace budgets`
    writes; "auto" is itself. UsageError for what is none.
    """
    if split in ("off", "auto"):
        return None if split == "off" else split
    if Path(split).suffix == ".json" or Path(split).is_file():
        found = _numbers(budgets_file(split).get("split"), f"{split}: split")
    else:
        found = _numbers(split.split(","), "--split")
    if max(found) > 1:
        raise UsageError(f"--split is a share of an expert, at most 1: {max(found):g}")
    return found[0] if len(found) == 1 else found


LOW_BELOW = 0.4  # of a token's gate weights: HOBBIT's T1 = 0.6, from the other end


def thresholds_of(
    miss_precision: str, low_below: float | None, skip_below: float, substitute_below: float
) -> tuple[float, float, float]:
    """(low, skip, substitute): tails below which misses get less; 0 where that is off. UsageError
    for what is no share, and where one of them leaves another nothing to do."""
    named = {
        "low-below": low_below, "skip-below": skip_below, "substitute-below": substitute_below,
    }  # fmt: skip
    for name, value in named.items():
        if value is not None and not 0 <= value <= 1:
            raise UsageError(f"--{name} is a share of the gate weights, from 0 to 1: {value}")
    if miss_precision == "off":
        if low_below is not None:
            raise UsageError("--low-below is for --miss-precision, which is off: give both")
        low = 0.0
    else:
        low = LOW_BELOW if low_below is None else low_below
        if low == 0:
            raise UsageError("--low-below 0 serves no miss from its copy: leave out both")
    order = [(name, v) for name, v in (
        ("skip-below", skip_below), ("substitute-below", substitute_below), ("low-below", low),
    ) if v]  # fmt: skip
    for (name, value), (above, more) in pairwise(order):
        if value >= more:
            raise UsageError(f"--{name} {value:g} must be less than --{above} {more:g}")
    return low, skip_below, substitute_below


def share_of(value: str, what: str) -> float:
    """A share, written as 12.5%. UsageError for what is none."""
    share = Amount.parse(value, what).share
    if share is None:
        raise UsageError(f"{what} is a share, as 12.5%: {value!r}")
    return share


BUDGETS = "greenroom-budgets"  # the format of such a file


def budgets_file(path: str | Path) -> dict[str, Any]:
    """What `greenroom trace budgets` wrote: `slots` and, where experts are split, `split` of each
    layer. UsageError where it cannot be read, or is another file."""
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} holds no budgets: it is not JSON") from error
    if not isinstance(found, dict) or found.get("format") != BUDGETS:
        raise UsageError(f"{path} holds no budgets: greenroom trace budgets makes such files")
    return found


def _numbers(values: Any, what: str) -> tuple[float, ...]:
    """Numbers above 0, or UsageError."""
    try:
        found = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise UsageError(f"{what} must be numbers, one a layer: {values!r}") from None
    if not found or not all(0 < number < math.inf for number in found):
        raise UsageError(f"{what} must be numbers above 0, one a layer: {values!r}")
    return found


def _option(default: Any, text: str, metavar: str | None = None, choices: Any = None) -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar, "choices": choices})


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How a model is held in memory."""

    memory: str | int | None = _option(
        None,
        "budget of the whole process, on a GPU of its memory: 8GiB, 60%% of what is available, or"
        " auto (the default)",
        "SIZE",
    )
    host_memory: str | int | None = _option(
        None, "with a GPU, budget of the process in host memory, where experts wait too: 16GiB,"
        " 60%% of what is available, or auto (the default)", "SIZE",
    )  # fmt: skip
    cache: str | int | None = _option(
        None, "size of the expert cache alone: 25%% of the experts, or 2GiB", "SIZE"
    )
    policy: str = _option("auto", "who is evicted: auto, lru, llru, moe-infinity, ...", "NAME")
    scope: str = _option(
        "shared", "one cache for all layers, one a layer of equal size, or sizes as the numbers"
        " (one a layer) or the file of `greenroom trace budgets` say",
        "shared|per-layer|N,N,...|FILE",
    )  # fmt: skip
    pin: str | None = _option(
        None, "keep the experts of a task, as the file of `greenroom trace hot` says; of several"
        " tasks those of the one nearest to each prompt", "FILE",
    )  # fmt: skip
    split: str = _option(
        "off", "of packed experts keep a top part and fetch the rest when it is needed: a share of"
        " the expert as 0.5, or those of each layer as numbers or the file of `greenroom trace"
        " budgets` say; auto sets budgets and shares by what earlier runs recorded (MoEpic's"
        " Algorithm 1)", "off|auto|SHARE|N,N,...|FILE",
    )  # fmt: skip
    miss_precision: str = _option(
        "off", "serve misses of small gate weight from the low-precision copies of a pack that has"
        " them (pack --miss-precision): faster, but THE OUTPUT CHANGES, and depends on what the"
        " cache holds", None, PRECISIONS,
    )  # fmt: skip
    low_below: float | None = _option(
        None, "with --miss-precision: misses of experts that, with all smaller ones of the token,"
        " have less than this share of its gate weights (default: 0.4, which is HOBBIT's T1 = 0.6)",
        "SHARE",
    )  # fmt: skip
    low_share: str = _option(
        LOW_SHARE, "with --miss-precision: share of the cache's memory that copies have", "SHARE"
    )
    low_follow: bool = _option(
        False, "with --miss-precision: the exact expert follows a copy that was used, while the"
        " link is idle, so that more is exact; tokens take longer",
    )  # fmt: skip
    skip_below: float = _option(
        0.0, "leave out misses below this share of the gate weights, which changes the output:"
        " HOBBIT's T2 = 0.9 is 0.1 (default: none)", "SHARE",
    )  # fmt: skip
    substitute_below: float = _option(
        0.0, "replace misses below this share of the gate weights by the expert that is there and"
        " was most often chosen with them, which changes the output (default: none)", "SHARE",
    )  # fmt: skip
    prefetch: str = _option(
        "auto", "fetch experts before they are asked for, by a predictor: auto, off, next-gate,"
        " learned, markov, ...; a distance in layers may follow, as next-gate:2", "NAME[:D]"
    )  # fmt: skip
    predictor: str | None = _option(
        None, "the file of `greenroom train-predictor`, for the predictor learned", "FILE"
    )
    no_guard: bool = _option(False, "prefetch also where that is slower")
    co_compute: str = _option(
        "off", "with a GPU, have the host's processor compute experts that are missing there, where"
        " that is sooner than to move them; answers may then differ in their last bits from run to"
        " run, by what was in the cache", None, CO_COMPUTE,
    )  # fmt: skip
    kernels: str = _option("auto", "what computes the experts", None, KERNELS)
    device: str = _option(
        "auto", "where the experts are computed; over several GPUs, as cuda:0,cuda:1, they are"
        " spread", "auto|cpu|cuda[:N][,cuda:N...]|fake",
    )  # fmt: skip
    context: int = _option(4096, "tokens that the KV cache must have room for", "N")
    kv: str = _option(
        "dynamic", "how keys and values are kept: dynamic as they are computed; fp8, int4, int2"
        " quantised, which changes the output (int4 and int2 need optimum-quanto); offloaded with"
        " a GPU in host memory", None, KV,
    )  # fmt: skip
    readers: int = _option(2, "threads that read experts", "N")
    direct: str = _option("auto", "read past the page cache (O_DIRECT)", None,
                          ("auto", "on", "off"))  # fmt: skip
    read_limit: str | int | None = _option(
        None, "read experts no faster than so many bytes a second, as from a slower disk", "SIZE"
    )
    dtype: str = _option("auto", "compute in this type instead of the checkpoint's", None,
                         ("auto", "bfloat16", "float16", "float32"))  # fmt: skip
    threads: int | None = _option(None, "threads that compute (all cores by default)", "N")

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
        devices_of(self.device)
        scope_of(self.scope)
        split_of(self.split)
        _check_choices(self)
        thresholds_of(self.miss_precision, self.low_below, self.skip_below, self.substitute_below)
        share_of(self.low_share, "--low-share")
        if self.miss_precision == "off" and self.low_share != LOW_SHARE:
            raise UsageError("--low-share is for --miss-precision, which is off: give both")
        if self.miss_precision == "off" and self.low_follow:
            raise UsageError("--low-follow is for --miss-precision, which is off: give both")
        if self.miss_precision != "off" and self.split != "off":
            raise UsageError("--miss-precision and --split exclude each other: give one of them")


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How tokens are chosen, under transformers' own names. Unset: the model's own defaults."""

    max_new_tokens: int = _option(256, "stop after this many tokens", "N")
    temperature: float | None = _option(
        None, "0 takes the likeliest token; unset: the model's own generation settings", "T"
    )
    top_p: float | None = _option(None, "keep the likeliest tokens up to this probability", "P")
    top_k: int | None = _option(None, "keep this many likeliest tokens", "K")
    seed: int | None = _option(None, "makes sampling repeatable", "N")

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature is not None and self.temperature < 0:
            raise UsageError(f"--temperature must not be negative, got {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k must be at least 1, got {self.top_k}")
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise UsageError(
                "--temperature 0 takes the likeliest token: leave out --top-p, --top-k"
            )


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """How a server takes requests, and how many at a time."""

    host: str = _option(
        "127.0.0.1", "address to listen on; any but loopback needs an API key", "ADDRESS"
    )
    port: int = _option(8000, "port to listen on, 0 for any that is free", "N")
    api_key_file: str | None = _option(
        None, "file whose first line is the key that clients must give (or the variable"
        " GREENROOM_API_KEY)", "FILE",
    )  # fmt: skip
    model_name: str | None = _option(
        None, "what clients call the model (default: the last part of MODEL)", "NAME"
    )
    max_batch: int = _option(8, "requests that are answered at a time", "N")
    max_queue: int = _option(64, "requests that may wait; one more is refused (429)", "N")
    max_tokens: int | None = _option(
        None, "most new tokens of an answer (default: as many as --context has room for)", "N"
    )
    timeout: float = _option(600.0, "seconds that an answer may take, the queue included", "S")
    grace: float = _option(30.0, "seconds that running answers get when the server stops", "S")
    prefill_chunk: int = _option(
        128, "tokens of prompts that are read in one pass while answers run (512 if none runs)", "N"
    )
    batch_delay: float = _option(
        0.0, "milliseconds that a prompt waits for others, which share most of its experts", "MS"
    )
    batch_invariant: bool = _option(
        False, "compute every request as if it were alone: its answer is the same beside any"
        " others, at a cost in speed"
    )  # fmt: skip
    kv_memory: str | int | None = _option(
        None, "keys and values of all requests together, 1GiB or a share of the budget (default:"
        " --max-batch full contexts, but no more than 25%% of what the experts could have)", "SIZE",
    )  # fmt: skip
    prefix_share: str = _option(
        "50%", "share of --kv-memory that may keep what was read, for requests that begin alike",
        "SHARE",
    )  # fmt: skip
    no_prefix_reuse: bool = _option(False, "read every prompt from its first token")
    max_body: str | int = _option("4MiB", "largest request body", "SIZE")
    allowed_origins: str | None = _option(
        None, "web pages that may call the server (CORS), none by default", "URL,..."
    )
    log_format: str = _option("text", "one line a request", None, ("text", "json"))

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("max_queue", 0), ("port", 0), ("grace", 0),
                            ("prefill_chunk", 1), ("batch_delay", 0)):  # fmt: skip
            _at_least(self, name, least)
        if self.port > 65535:
            raise UsageError(f"--port must be at most 65535, got {self.port}")
        if self.prefill_chunk > 512:
            raise UsageError(f"--prefill-chunk must be at most 512, got {self.prefill_chunk}")
        if self.max_tokens is not None:
            _at_least(self, "max_tokens", 1)
        if not 0 < self.timeout < float("inf"):
            raise UsageError(f"--timeout must be above 0, got {self.timeout}")
        if self.kv_memory is not None:
            Amount.parse(self.kv_memory, "--kv-memory")
        if Amount.parse(self.prefix_share, "--prefix-share").share is None:
            raise UsageError(f"--prefix-share is a share, as 50%: {self.prefix_share!r}")
        if Amount.parse(self.max_body, "--max-body").nbytes is None:
            raise UsageError(f"--max-body is an amount, as 4MiB: {self.max_body!r}")
        _check_choices(self)


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """What a recorded trace holds beside the experts."""

    weights: bool = _option(False, "record the gate's weights too")
    token_ids: bool = _option(False, "record the token ids too")
    gate_inputs: float = _option(
        0.0, "record the hidden states that go to the gates, of this share of the tokens", "RATE"
    )
    predict: str | None = _option(
        None, "record what these predictors expect, which run beside the model", "NAME[:D],..."
    )
    raw: bool = _option(False, "apply no chat template to prompts that are text")

    def __post_init__(self) -> None:
        if not 0 <= self.gate_inputs <= 1:
            raise UsageError(f"--gate-inputs must be from 0 to 1, got {self.gate_inputs}")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How the networks of the predictor learned are made."""

    distance: int = _option(1, "layers that it looks ahead", "D")
    hidden: int = _option(128, "hidden size of each layer's network", "N")
    epochs: int = _option(20, "times that each token is looked at", "N")
    held_out: float = _option(0.2, "share of the requests that accuracy is measured on", "SHARE")
    seed: int = _option(0, "makes the split and the training repeatable", "N")

    def __post_init__(self) -> None:
        for name in ("distance", "hidden", "epochs"):
            _at_least(self, name, 1)
        _at_least(self, "seed", 0)
        if not 0 < self.held_out < 1:
            raise UsageError(f"--held-out must be above 0 and below 1, got {self.held_out}")


@dataclass(frozen=True, slots=True)
class SynthConfig:
    """What every synthetic trace has."""

    layers: int = _option(32, "MoE layers", "N")
    experts: int = _option(8, "experts of a layer", "N")
    top_k: int = _option(1, "experts that a token uses in each layer", "N")
    tokens: int = _option(10_000, "tokens, shared out evenly among the requests", "N")
    requests: int = _option(1, "requests", "N")
    prompt_tokens: int = _option(0, "tokens of each request that are one prefill pass", "N")
    seed: int = _option(0, "makes the trace repeatable", "N")

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "top_k", "tokens", "requests"):
            _at_least(self, name, 1)
        for name in ("prompt_tokens", "seed"):
            _at_least(self, name, 0)
        if self.experts > 1 << 16:
            raise UsageError(f"--experts must be at most {1 << 16}, got {self.experts}")
        if self.top_k > self.experts:
            raise UsageError(f"--top-k {self.top_k} needs more than {self.experts} experts")
        if self.requests > self.tokens:
            raise UsageError(f"--requests {self.requests} needs more than {self.tokens} tokens")
        if self.prompt_tokens > (least := self.tokens // self.requests):
            raise UsageError(
                f"--prompt-tokens {self.prompt_tokens}: a request has only {least} tokens"
            )


@dataclass(frozen=True, slots=True)
class ZipfConfig(SynthConfig):
    """Independent draws: expert j of a layer, from 1, is used in proportion to 1 / (j + b)^a.

    Layered paging (LLRU), 5.1. Figure 6 (a) has a = 2 and 1 to 15 layers of 1 to 15 experts; (b)
    has 32 layers of 8 experts and a from 0 to 8; one expert a layer both.
    """

    a: float = _option(1.0, "exponent of the Zipf law; 0 is uniform", "A")
    b: float = _option(0.0, "shift of the Zipf law; makes the first experts more alike", "B")

    def __post_init__(self) -> None:
        SynthConfig.__post_init__(self)
        for name in ("a", "b"):
            _at_least(self, name, 0)


@dataclass(frozen=True, slots=True)
class TopicsConfig(SynthConfig):
    """Requests whose tokens keep to the tastes of their topic, and to what was just used.

    Each topic likes the experts of each layer by a normal draw, sharpened by `skew`. A token keeps
    each expert of the token before with probability `stickiness`, and draws the others by its
    topic's tastes (softmax). All tastes drift from one request to the next: 0 never, 1 anew.
    """

    layers: int = _option(16, "MoE layers", "N")
    experts: int = _option(64, "experts of a layer", "N")
    top_k: int = _option(8, "experts that a token uses in each layer", "N")
    requests: int = _option(50, "requests", "N")
    topics: int = _option(8, "topics; each request has one", "N")
    stickiness: float = _option(0.3, "chance that the next token uses an expert again", "P")
    drift: float = _option(0.02, "how far tastes move from request to request, 0 to 1", "D")
    skew: float = _option(1.0, "how strong tastes are; 0 likes all experts alike", "S")

    def __post_init__(self) -> None:
        SynthConfig.__post_init__(self)
        _at_least(self, "topics", 1)
        _at_least(self, "skew", 0)
        for name in ("stickiness", "drift"):
            _at_least(self, name, 0)
            if getattr(self, name) > 1:
                raise UsageError(f"--{name} must be at most 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class ContestConfig:
    """How settings are measured against each other."""

    prompts: str | None = _option(
        None, "prompts to answer: a line each, or JSON lines (default: six short ones)", "FILE"
    )
    tokens: int = _option(48, "tokens of each answer; the first eight are not counted", "N")
    rounds: int = _option(5, "times that every setting has its turn", "N")
    seconds: float | None = _option(None, "begin no further round after this long", "S")
    raw: bool = _option(False, "apply no chat template to prompts that are text")

    def __post_init__(self) -> None:
        if self.tokens < 16:
            raise UsageError(f"--tokens must be at least 16, got {self.tokens}")
        _at_least(self, "rounds", 1)
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(f"--seconds must be above 0, got {self.seconds}")


def _at_least(config: Any, name: str, least: int) -> None:
    value = getattr(config, name)
    if not least <= value < float("inf"):
        raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def _check_choices(config: Any) -> None:
    for option in fields(config):
        choices, value = option.metadata["choices"], getattr(config, option.name)
        if choices and value not in choices:
            raise UnknownName(option.name, value, choices)
