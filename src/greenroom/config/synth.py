"""Options of synthetic traces."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.errors import UsageError
from greenroom.option import at_least, check_options, option


@dataclass(frozen=True, slots=True)
class SynthConfig:
    """Options that every kind of synthetic routing trace has."""

    layers: int = option(32, "MoE layers", "N", check=at_least(1))
    experts: int = option(8, "experts of a layer", "N", check=at_least(1, 1 << 16))
    top_k: int = option(1, "experts that a token uses in each layer", "N", check=at_least(1))
    tokens: int = option(
        10_000, "number of tokens, divided evenly among the requests", "N", check=at_least(1)
    )
    requests: int = option(1, "requests", "N", check=at_least(1))
    prompt_tokens: int = option(
        0, "tokens of each request that are one prefill pass", "N", check=at_least(0)
    )
    seed: int = option(0, "seed of the random numbers", "N", check=at_least(0))

    def __post_init__(self) -> None:
        check_options(self)
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
    """Options of traces that draw each layer's experts independently, by a Zipf law.

    Expert j of a layer, counted from 1, is used in proportion to 1 / (j + b)^a. Layered paging
    (LLRU), 5.1. Figure 6 (a) has a = 2 and 1 to 15 layers of 1 to 15 experts; (b) has 32 layers of
    8 experts and a from 0 to 8; one expert a layer both.
    """

    a: float = option(1.0, "exponent of the Zipf law; 0 is uniform", "A", check=at_least(0))
    b: float = option(
        0.0, "shift of the Zipf law; makes the first experts more alike", "B", check=at_least(0)
    )


@dataclass(frozen=True, slots=True)
class TopicsConfig(SynthConfig):
    """Options of traces whose tokens prefer their topic's experts and recently used ones.

    Each topic has normally distributed preferences for the experts of each layer, scaled by `skew`.
    A token reuses each expert of the token before with probability `stickiness`, and draws the
    others by its topic's preferences (softmax). All preferences drift from one request to the next:
    with 0 never, with 1 they are drawn anew.
    """

    layers: int = option(16, "MoE layers", "N", check=at_least(1))
    experts: int = option(64, "experts of a layer", "N", check=at_least(1, 1 << 16))
    top_k: int = option(8, "experts that a token uses in each layer", "N", check=at_least(1))
    requests: int = option(50, "requests", "N", check=at_least(1))
    topics: int = option(8, "topics; each request has one", "N", check=at_least(1))
    stickiness: float = option(
        0.3, "probability that the next token uses an expert again", "P", check=at_least(0, 1)
    )
    drift: float = option(
        0.02, "change of preferences from request to request, 0 to 1", "D", check=at_least(0, 1)
    )
    skew: float = option(
        1.0, "strength of preferences; with 0 all experts are equal", "S", check=at_least(0)
    )
