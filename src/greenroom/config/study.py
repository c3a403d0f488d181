"""Options of recording, training predictors and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.config.tables import check_policy, check_predictor
from greenroom.option import above, at_least, check_options, option, within

LEAST_TOKENS = 50  # for training a predictor, and for its test


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """Options of recording a routing trace."""

    weights: bool = option(False, "also record the gate weights of the chosen experts", shown=True)
    token_ids: bool = option(False, "also record the ids of the tokens", shown=True)
    gate_inputs: float = option(
        0.0, "also record the hidden states that the gates receive, for this share of the tokens (0"
        " to 1)", "RATE",
        check=within(0, 1), shown=True,
    )  # fmt: skip
    output_norms: bool = option(
        False, "also record the norm of each chosen expert's output, and how much a layer's routed"
        " experts change each token, for `trace hot --score easy-ep`"
    )  # fmt: skip
    predict: str | None = option(
        None, "also run these predictors of experts, and record what they predict", "NAME[:D],..."
    )
    raw: bool = option(False, "do not apply the chat template to text prompts")

    def __post_init__(self) -> None:
        check_options(self)
        for name in (self.predict or "").split(","):
            if name and "=" not in name.partition(":")[0]:  # an option of the predictor before it
                check_predictor(name)


@dataclass(frozen=True, slots=True)
class ViewConfig:
    """Options of playing a recording back."""

    cache: str | None = option(
        None, "for traces: slots of the simulated expert cache, a number or a share of the experts"
        " (default: 25%%)", "N", shown=True,
    )  # fmt: skip
    policy: str | None = option(
        None, "for traces: eviction policy of the simulated cache (default: auto)", "NAME",
        check=lambda value, name: check_policy(value), shown=True,
    )  # fmt: skip
    limit: int | None = option(
        None, "for traces: play the first N tokens (default: 2000)", "N", check=at_least(1),
        shown=True,
    )  # fmt: skip
    port: int = option(
        0, "port on this machine; 0 takes any free port", "N", check=at_least(0, 65535), shown=True
    )
    no_browser: bool = option(False, "print the address, and open no browser", shown=True)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Options of training the expert predictor called `learned`."""

    distance: int = option(
        1, "how many layers ahead the predictor predicts", "D", check=at_least(1)
    )
    hidden: int | None = option(
        None,
        "hidden size of each layer's network (default: so that a network has about 2 million"
        " parameters, as in ProMoE; at most 1024)",
        "N",
        check=at_least(1),
    )
    epochs: int = option(20, "how often training goes over all its tokens", "N", check=at_least(1))
    tokens: int = option(
        40_000,
        "train on at most N tokens, drawn at random from the trace; bounds memory and time",
        "N",
        check=at_least(LEAST_TOKENS),
    )
    next_gate: bool = option(
        False, "let next-gate predict the layers for which it is more accurate on held-out"
        " requests, from a trace of `trace record --predict next-gate:D`, D being the distance",
    )  # fmt: skip
    held_out: float = option(
        0.2,
        "share of the requests that are not trained on, but measure the accuracy",
        "SHARE",
        check=above(0, 1),
    )
    seed: int = option(
        0,
        "seed of the random numbers: which requests are held out, and the training",
        "N",
        check=at_least(0),
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class TrainPolicyConfig:
    """Options of training the eviction policy `next-use`."""

    epochs: int = option(12, "how often training goes over all its passes", "N", check=at_least(1))
    held_out: float = option(
        0.1,
        "share of the requests that are not trained on, but measure the gain",
        "SHARE",
        check=above(0, 1),
    )
    seed: int = option(
        0,
        "seed of the random numbers: which requests are held out, and the training",
        "N",
        check=at_least(0),
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class BenchmarkConfig:
    """Options of benchmarks, which compare settings of the expert cache in rounds."""

    prompts: str | None = option(
        None,
        "file of prompts: one a line, or JSON lines (default: six short prompts)",
        "FILE",
        shown=True,
    )
    tokens: int = option(
        48, "tokens of each answer; the times of the first eight are not counted", "N",
        check=at_least(16), shown=True,
    )  # fmt: skip
    rounds: int = option(
        5, "number of rounds; each measures every setting once", "N", check=at_least(1), shown=True
    )
    seconds: float | None = option(
        None, "begin no round after S seconds, except the second, which always runs", "S",
        check=above(0), shown=True,
    )  # fmt: skip
    raw: bool = option(False, "do not apply the chat template to text prompts")

    def __post_init__(self) -> None:
        check_options(self)
