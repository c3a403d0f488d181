"""How tokens are chosen, and how a server takes requests."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.config.amounts import Amount
from greenroom.config.option import at_least, check_choices, option
from greenroom.errors import UsageError

GREEDY_BELOW = 1e-5  # temperatures at which the likeliest token is all that is left
LEAST_TEMPERATURE = 1e-2  # of those above: quotients of logits stay far from the largest float


def bounded_temperature(temperature: float) -> float:
    """The temperature to sample with, as vLLM bounds it: 0, or at least 0.01."""
    return 0.0 if temperature < GREEDY_BELOW else max(temperature, LEAST_TEMPERATURE)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How tokens are chosen, under transformers' own names. Unset: the model's own defaults."""

    max_new_tokens: int = option(256, "stop after this many tokens", "N")
    temperature: float | None = option(
        None, "0 takes the likeliest token; unset: the model's own generation settings", "T"
    )
    top_p: float | None = option(None, "keep the likeliest tokens up to this probability", "P")
    top_k: int | None = option(None, "keep this many likeliest tokens", "K")
    seed: int | None = option(None, "makes sampling repeatable", "N")

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature is not None and not 0 <= self.temperature <= 100:
            raise UsageError(f"--temperature must be from 0 to 100, got {self.temperature}")
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

    host: str = option(
        "127.0.0.1", "address to listen on; any but loopback needs an API key", "ADDRESS"
    )
    port: int = option(8000, "port to listen on, 0 for any that is free", "N")
    api_key_file: str | None = option(
        None, "file whose first line is the key that clients must give (or the variable"
        " GREENROOM_API_KEY)", "FILE",
    )  # fmt: skip
    model_name: str | None = option(
        None, "what clients call the model (default: the last part of MODEL)", "NAME"
    )
    max_batch: int = option(8, "requests that are answered at a time", "N")
    max_queue: int = option(64, "requests that may wait; one more is refused (429)", "N")
    max_tokens: int | None = option(
        None, "most new tokens of an answer (default: as many as --context has room for)", "N"
    )
    timeout: float = option(600.0, "seconds that an answer may take, the queue included", "S")
    grace: float = option(30.0, "seconds that running answers get when the server stops", "S")
    prefill_chunk: int = option(
        128, "tokens of prompts that are read in one pass while answers run (512 if none runs)", "N"
    )
    batch_delay: float = option(
        0.0, "milliseconds that a prompt waits for others, which share most of its experts", "MS"
    )
    batch_invariant: bool = option(
        False, "compute every request as if it were alone: its answer is the same beside any"
        " others, at a cost in speed"
    )  # fmt: skip
    kv_memory: str | int | None = option(
        None, "keys and values of all requests together, 1GiB or a share of the budget (default:"
        " --max-batch full contexts, but no more than 25%% of what the experts could have)", "SIZE",
    )  # fmt: skip
    prefix_share: str = option(
        "50%", "share of --kv-memory that may keep what was read, for requests that begin alike",
        "SHARE",
    )  # fmt: skip
    no_prefix_reuse: bool = option(False, "read every prompt from its first token")
    max_body: str | int = option("4MiB", "largest request body", "SIZE")
    allowed_origins: str | None = option(
        None, "web pages that may call the server (CORS), none by default", "URL,..."
    )
    log_format: str = option("text", "one line a request", None, ("text", "json"))

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("max_queue", 0), ("port", 0), ("grace", 0),
                            ("prefill_chunk", 1), ("batch_delay", 0)):  # fmt: skip
            at_least(self, name, least)
        if self.port > 65535:
            raise UsageError(f"--port must be at most 65535, got {self.port}")
        if self.prefill_chunk > 512:
            raise UsageError(f"--prefill-chunk must be at most 512, got {self.prefill_chunk}")
        if self.max_tokens is not None:
            at_least(self, "max_tokens", 1)
        if not 0 < self.timeout < float("inf"):
            raise UsageError(f"--timeout must be above 0, got {self.timeout}")
        if self.kv_memory is not None:
            Amount.parse(self.kv_memory, "--kv-memory")
        if Amount.parse(self.prefix_share, "--prefix-share").share is None:
            raise UsageError(f"--prefix-share is a share, as 50%: {self.prefix_share!r}")
        if Amount.parse(self.max_body, "--max-body").nbytes is None:
            raise UsageError(f"--max-body is an amount, as 4MiB: {self.max_body!r}")
        check_choices(self)
