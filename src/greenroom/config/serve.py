"""Options of sampling and of the server."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.amounts import Amount, bytes_check, parse_share
from greenroom.config.load import LoadConfig
from greenroom.errors import UsageError
from greenroom.option import PREFETCHING, above, at_least, check_options, option, within

OFF, LOOKUP, MTP = "off", "lookup", "mtp"  # values of --speculate
GREEDY_BELOW = 1e-5  # lower temperatures choose the likeliest token
LEAST_TEMPERATURE = 1e-2  # of those above: quotients of logits stay far from the largest float


def bounded_temperature(temperature: float) -> float:
    """Bound a sampling temperature as vLLM does: 0, or at least 0.01.

    A temperature below 1e-5 becomes 0, which means greedy decoding.
    """
    return 0.0 if temperature < GREEDY_BELOW else max(temperature, LEAST_TEMPERATURE)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Options of sampling, named as in transformers.

    None means the value in the model's generation config.
    """

    max_new_tokens: int = option(
        256, "stop after this many tokens", "N", check=at_least(1), shown=True
    )
    temperature: float | None = option(
        None, "randomness of answers; 0 always takes the likeliest token (default: as the model's"
        " generation config says)", "T",
        check=within(0, 100), shown=True,
    )  # fmt: skip
    top_p: float | None = option(
        None, "sample among the likeliest tokens up to this total probability", "P"
    )
    top_k: int | None = option(
        None, "sample among this many likeliest tokens", "K", check=at_least(1)
    )
    seed: int | None = option(None, "seed of the random numbers, for repeatable answers", "N")

    def __post_init__(self) -> None:
        check_options(self)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p must be above 0 and at most 1, got {self.top_p}")
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise UsageError(
                "--temperature 0 always takes the likeliest token: leave out --top-p and --top-k"
            )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Options of speculation: several tokens in one pass, if their drafts are right."""

    speculate: str = option(
        OFF, "verify drafts of the next tokens in one pass, taken from what followed the same"
        " tokens before (lookup), or predicted by the checkpoint's MTP layer (mtp: one"
        " request at a time); the text stays the same, on a GPU but for rounding",
        None, (OFF, LOOKUP, MTP), shown=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class ServeConfig(SpeculationConfig):
    """Options of the HTTP server."""

    host: str = option(
        "127.0.0.1", "address to listen on; any other than localhost needs an API key", "ADDRESS",
        shown=True,
    )  # fmt: skip
    port: int = option(
        8000, "port to listen on; 0 takes any free port", "N", check=at_least(0, 65535), shown=True
    )
    api_key_file: str | None = option(
        None, "file whose first line is the API key that clients must send; the environment"
        " variable GREENROOM_API_KEY does the same", "FILE", shown=True,
    )  # fmt: skip
    model_name: str | None = option(
        None, "name by which clients call the model (default: the last part of MODEL)", "NAME"
    )
    max_batch: int = option(
        8, "most requests that are answered at the same time", "N", check=at_least(1), shown=True
    )
    max_queue: int = option(
        64,
        "most requests that may wait for an answer; others are refused with HTTP 429",
        "N",
        check=at_least(0),
    )
    max_tokens: int | None = option(
        None, "most tokens of an answer (default: as many as --context leaves after the prompt)", ""
        "N",
        check=at_least(1),
    )  # fmt: skip
    timeout: float = option(
        600.0,
        "seconds that an answer may take, the time in the queue included",
        "S",
        check=above(0),
    )
    grace: float = option(
        30.0,
        "seconds that unfinished answers may go on after the server was told to stop",
        "S",
        check=at_least(0),
    )
    prefill_chunk: int = option(
        128, "prompt tokens that one forward pass computes while other answers are generated, at"
        " most --prompt-block; --prompt-block if there are none",
        "N", check=at_least(1, 8192),
    )  # fmt: skip
    batch_delay: float = option(
        0.0, "milliseconds that a prompt waits for other prompts, to be computed with them: they"
        " share the reads of experts", "MS",
        check=at_least(0),
    )  # fmt: skip
    batch_invariant: bool = option(
        False, "make each answer's bits independent of other requests at the same time; slower"
    )  # fmt: skip
    kv_memory: str | int | None = option(
        None, "memory for the KV caches of all requests: 1GiB, or a share of --memory as 10%%"
        " (default: enough for --max-batch full contexts, but at most 25%% of what experts could"
        " use)", "SIZE",
        check=Amount.parse,
    )  # fmt: skip
    prefix_share: str = option(
        "50%", "share of --kv-memory for computed beginnings of prompts, which later requests"
        " reuse",
        "SHARE", check=lambda value, name: parse_share(value, name, "50%"),
    )  # fmt: skip
    no_prefix_reuse: bool = option(False, "compute every prompt from its first token on")
    prompt_cache: str | None = option(
        None, "store computed prompts in files of this folder, too, so that they need not be"
        " computed again after a restart; the files have the prompts' tokens", "DIR", shown=True,
    )  # fmt: skip
    prompt_cache_size: str | int = option(
        "8GiB", "largest size of all files in --prompt-cache; the least recently used are removed",
        "SIZE", check=bytes_check("an amount, as 8GiB"), needs="prompt_cache",
    )  # fmt: skip
    no_idle_prefetch: bool = option(
        False, "do not read experts into free slots while no request is computed", group=PREFETCHING
    )
    max_body: str | int = option(
        "4MiB", "largest body of an HTTP request", "SIZE", check=bytes_check("an amount, as 4MiB")
    )
    picture_tokens: int = option(
        1024, "most tokens of a picture in a message, with models that read pictures; larger ones"
        " are scaled down; 0: no pictures", "N", check=at_least(0),
    )  # fmt: skip
    allowed_origins: str | None = option(
        None, "origins of web pages that may call the server (CORS; default: none)", "URL,..."
    )
    no_page: bool = option(
        False, "serve no live page at /, which shows the experts in memory, speed and requests"
    )
    log_format: str = option(
        "text", "format of the log, which has one line for each request", None, ("text", "json")
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.prompt_cache is not None and self.no_prefix_reuse:
            raise UsageError(
                "--prompt-cache and --no-prefix-reuse exclude each other: leave out one of them"
            )

    def check_variants(self, load: LoadConfig) -> None:
        """Raise UsageError for options that exclude several variants of a model (`--adapter`)."""
        excluded = {
            "--speculate mtp": self.speculate == MTP,
            "--split": load.split != OFF,
            "--pin": load.pin is not None,
            "--predictor": load.predictor is not None,
            "--miss-precision, --skip-below, --substitute-below or --cache-bias": (
                load.approximation()
            ),
            "--co-compute auto": load.uses_host(),
        }
        for name in (name for name, is_set in excluded.items() if is_set):
            raise UsageError(f"{name} cannot be used with --adapter here: leave out one of them")

    def check_drafts(self) -> None:
        """Raise UsageError if the requests at a time are too many for the drafts."""
        if self.speculate == MTP and self.max_batch > 1:
            raise UsageError(
                "--speculate mtp drafts for one request at a time: add --max-batch 1, or use"
                " --speculate lookup"
            )
