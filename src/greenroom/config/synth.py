"""Options of synthetic traces."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.errors import UsageError
from greenroom.option import at_least, check_options, option


@dataclass(frozen=True, slots=True)
class SynthConfig:
    """Options that every kind of synthetic routing trace has."""

    layers: int = option(32, "number of MoE layers", "N", check=at_least(1))
    experts: int = option(8, "number of experts in a layer", "N", check=at_least(1, 1 << 16))
    top_k: int = option(1, "experts that a token uses in each layer", "N", check=at_least(1))
    tokens: int = option(
        10_000, "number of tokens, divided evenly among the requests", "N", check=at_least(1)
    )
    requests: int = option(1, "number of requests", "N", check=at_least(1))
    prompt_tokens: int = option(
        0,
        "first tokens of each request that are its prompt, computed in one pass",
        "N",
        check=at_least(0),
    )
    seed: int = option(0, "seed of the random numbers", "N", check=at_least(0))

    def __post_init__(self) -> None:
        check_options(self)
        if self.top_k > self.experts:
            raise UsageError(
                f"--top-k {self.top_k} is more than the {self.experts} experts of a layer"
                " (--experts)"
            )
        if self.requests > self.tokens:
            raise UsageError(
                f"--requests {self.requests} is more than --tokens {self.tokens}: each request"
                " needs a token"
            )
        if self.prompt_tokens > (least := self.tokens // self.requests):
            raise UsageError(
                f"--prompt-tokens {self.prompt_tokens} is too many: a request has only {least}"
                " tokens (--tokens divided by --requests)"
            )


@dataclass(frozen=True, slots=True)
class ZipfConfig(SynthConfig):
    """Options of traces that draw each layer's experts independently, by a Zipf law.

    Expert j of a layer, counted from 1, is used in proportion to 1 / (j + b)^a. The traces are
    those of section 5.1 of the paper on layered paging (LLRU). Its figure 6 (a) has a = 2 and 1 to
    15 layers of 1 to 15 experts, its figure 6 (b) 32 layers of 8 experts and a from 0 to 8. In both
    a token uses one expert of each layer.
    """

    a: float = option(1.0, "exponent of the Zipf law; 0 is uniform", "A", check=at_least(0))
    b: float = option(
        0.0,
        "shift of the Zipf law; a larger one makes the most used experts more equal",
        "B",
        check=at_least(0),
    )


@dataclass(frozen=True, slots=True)
class TopicsConfig(SynthConfig):
    """Options of traces whose tokens prefer their topic's experts and recently used ones.

    Each topic has normally distributed preferences for the experts of each layer, scaled by `skew`.
    A token reuses each expert of the token before with probability `stickiness`, and draws its
    other experts by its topic's preferences (softmax). All preferences change from one request to
    the next by `drift`: with 0 not at all, with 1 they are drawn anew.
    """

    layers: int = option(16, "number of MoE layers", "N", check=at_least(1))
    experts: int = option(64, "number of experts in a layer", "N", check=at_least(1, 1 << 16))
    top_k: int = option(8, "experts that a token uses in each layer", "N", check=at_least(1))
    requests: int = option(50, "number of requests", "N", check=at_least(1))
    topics: int = option(
        8, "number of topics; each request has one of them", "N", check=at_least(1)
    )
    stickiness: float = option(
        0.3,
        "probability that a token uses an expert of the token before again",
        "P",
        check=at_least(0, 1),
    )
    drift: float = option(
        0.02,
        "how much the topics' preferences change from request to request, 0 to 1",
        "D",
        check=at_least(0, 1),
    )
    skew: float = option(
        1.0,
        "strength of the topics' preferences; with 0 all experts are equal",
        "S",
        check=at_least(0),
    )
