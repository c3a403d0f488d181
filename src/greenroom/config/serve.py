"""How tokens are chosen, and how a server takes requests."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.amounts import Amount, bytes_check, parse_share
from greenroom.errors import UsageError
from greenroom.option import above, at_least, check_options, option, within

GREEDY_BELOW = 1e-5  # temperatures at which the likeliest token is all that is left
LEAST_TEMPERATURE = 1e-2  # of those above: quotients of logits stay far from the largest float


def bounded_temperature(temperature: float) -> float:
    """The temperature to sample with, as vLLM bounds it: 0, or at least 0.01."""
    return 0.0 if temperature < GREEDY_BELOW else max(temperature, LEAST_TEMPERATURE)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How tokens are chosen, under transformers' own names. Unset: the model's own defaults."""

    max_new_tokens: int = option(
        256, "stop after this many tokens", "N", check=at_least(1), shown=True
    )
    temperature: float | None = option(
        None, "0 takes the likeliest token; unset: the model's own generation settings", "T",
        check=within(0, 100), shown=True,
    )  # fmt: skip
    top_p: float | None = option(None, "keep the likeliest tokens up to this probability", "P")
    top_k: int | None = option(None, "keep this many likeliest tokens", "K", check=at_least(1))
    seed: int | None = option(None, "makes sampling repeatable", "N")

    def __post_init__(self) -> None:
        check_options(self)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p must be above 0 and at most 1, got {self.top_p}")
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise UsageError(
                "--temperature 0 takes the likeliest token: leave out --top-p, --top-k"
            )


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """How a server takes requests, and how many at a time."""

    host: str = option(
        "127.0.0.1", "address to listen on; any but loopback needs an API key", "ADDRESS",
        shown=True,
    )  # fmt: skip
    port: int = option(
        8000, "port to listen on, 0 for any that is free", "N", check=at_least(0, 65535), shown=True
    )
    api_key_file: str | None = option(
        None, "file whose first line is the key that clients must give (or the variable"
        " GREENROOM_API_KEY)", "FILE", shown=True,
    )  # fmt: skip
    model_name: str | None = option(
        None, "what clients call the model (default: the last part of MODEL)", "NAME"
    )
    max_batch: int = option(
        8, "requests that are answered at a time", "N", check=at_least(1), shown=True
    )
    max_queue: int = option(
        64, "requests that may wait; one more is refused (429)", "N", check=at_least(0)
    )
    max_tokens: int | None = option(
        None, "most new tokens of an answer (default: as many as --context has room for)", "N",
        check=at_least(1),
    )  # fmt: skip
    timeout: float = option(
        600.0, "seconds that an answer may take, the queue included", "S", check=above(0)
    )
    grace: float = option(
        30.0, "seconds that running answers get when the server stops", "S", check=at_least(0)
    )
    prefill_chunk: int = option(
        128, "tokens of prompts that are read in one pass while answers run (512 if none runs)",
        "N", check=at_least(1, 512),
    )  # fmt: skip
    batch_delay: float = option(
        0.0, "milliseconds that a prompt waits for others, which share most of its experts", "MS",
        check=at_least(0),
    )  # fmt: skip
    batch_invariant: bool = option(
        False, "compute every request as if it were alone: its answer is the same beside any"
        " others, at a cost in speed"
    )  # fmt: skip
    kv_memory: str | int | None = option(
        None, "keys and values of all requests together, 1GiB or a share of the budget (default:"
        " --max-batch full contexts, but no more than 25%% of what the experts could have)", "SIZE",
        check=Amount.parse,
    )  # fmt: skip
    prefix_share: str = option(
        "50%", "share of --kv-memory that may keep what was read, for requests that begin alike",
        "SHARE", check=lambda value, name: parse_share(value, name, "50%"),
    )  # fmt: skip
    no_prefix_reuse: bool = option(False, "read every prompt from its first token")
    max_body: str | int = option(
        "4MiB", "largest request body", "SIZE", check=bytes_check("an amount, as 4MiB")
    )
    allowed_origins: str | None = option(
        None, "web pages that may call the server (CORS), none by default", "URL,..."
    )
    log_format: str = option("text", "one line a request", None, ("text", "json"))

    def __post_init__(self) -> None:
        check_options(self)
