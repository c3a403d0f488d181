"""What synthetic traces are like."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.config.option import at_least, option
from greenroom.errors import UsageError


@dataclass(frozen=True, slots=True)
class SynthConfig:
    """What every synthetic trace has."""

    layers: int = option(32, "MoE layers", "N")
    experts: int = option(8, "experts of a layer", "N")
    top_k: int = option(1, "experts that a token uses in each layer", "N")
    tokens: int = option(10_000, "tokens, shared out evenly among the requests", "N")
    requests: int = option(1, "requests", "N")
    prompt_tokens: int = option(0, "tokens of each request that are one prefill pass", "N")
    seed: int = option(0, "makes the trace repeatable", "N")

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "top_k", "tokens", "requests"):
            at_least(self, name, 1)
        for name in ("prompt_tokens", "seed"):
            at_least(self, name, 0)
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

    a: float = option(1.0, "exponent of the Zipf law; 0 is uniform", "A")
    b: float = option(0.0, "shift of the Zipf law; makes the first experts more alike", "B")

    def __post_init__(self) -> None:
        SynthConfig.__post_init__(self)
        for name in ("a", "b"):
            at_least(self, name, 0)


@dataclass(frozen=True, slots=True)
class TopicsConfig(SynthConfig):
    """Requests whose tokens keep to the tastes of their topic, and to what was just used.

    Each topic likes the experts of each layer by a normal draw, sharpened by `skew`. A token keeps
    each expert of the token before with probability `stickiness`, and draws the others by its
    topic's tastes (softmax). All tastes drift from one request to the next: 0 never, 1 anew.
    """

    layers: int = option(16, "MoE layers", "N")
    experts: int = option(64, "experts of a layer", "N")
    top_k: int = option(8, "experts that a token uses in each layer", "N")
    requests: int = option(50, "requests", "N")
    topics: int = option(8, "topics; each request has one", "N")
    stickiness: float = option(0.3, "chance that the next token uses an expert again", "P")
    drift: float = option(0.02, "how far tastes move from request to request, 0 to 1", "D")
    skew: float = option(1.0, "how strong tastes are; 0 likes all experts alike", "S")

    def __post_init__(self) -> None:
        SynthConfig.__post_init__(self)
        at_least(self, "topics", 1)
        at_least(self, "skew", 0)
        for name in ("stickiness", "drift"):
            at_least(self, name, 0)
            if getattr(self, name) > 1:
                raise UsageError(f"--{name} must be at most 1, got {getattr(self, name)}")
