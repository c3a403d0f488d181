"""How a model is recorded, predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.config.tables import check_predictor
from greenroom.option import above, at_least, check_options, option, within


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """What a recorded trace holds beside the experts."""

    weights: bool = option(False, "record the gate's weights too", shown=True)
    token_ids: bool = option(False, "record the token ids too", shown=True)
    gate_inputs: float = option(
        0.0, "record the hidden states that go to the gates, of this share of the tokens", "RATE",
        check=within(0, 1), shown=True,
    )  # fmt: skip
    predict: str | None = option(
        None, "record what these predictors expect, which run beside the model", "NAME[:D],..."
    )
    raw: bool = option(False, "apply no chat template to prompts that are text")

    def __post_init__(self) -> None:
        check_options(self)
        for name in (self.predict or "").split(","):
            if name and "=" not in name.partition(":")[0]:  # an option of the one before
                check_predictor(name)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How the networks of the predictor learned are made."""

    distance: int = option(1, "layers that it looks ahead", "D", check=at_least(1))
    hidden: int = option(128, "hidden size of each layer's network", "N", check=at_least(1))
    epochs: int = option(20, "times that each token is looked at", "N", check=at_least(1))
    held_out: float = option(
        0.2, "share of the requests that accuracy is measured on", "SHARE", check=above(0, 1)
    )
    seed: int = option(0, "makes the split and the training repeatable", "N", check=at_least(0))

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class BenchmarkConfig:
    """How settings are measured against each other."""

    prompts: str | None = option(
        None,
        "prompts to answer: a line each, or JSON lines (default: six short ones)",
        "FILE",
        shown=True,
    )
    tokens: int = option(
        48, "tokens of each answer; the first eight are not counted", "N",
        check=at_least(16), shown=True,
    )  # fmt: skip
    rounds: int = option(
        5, "times that every setting has its turn", "N", check=at_least(1), shown=True
    )
    seconds: float | None = option(
        None, "begin no further round after this long, but the second", "S",
        check=above(0), shown=True,
    )  # fmt: skip
    raw: bool = option(False, "apply no chat template to prompts that are text")

    def __post_init__(self) -> None:
        check_options(self)
