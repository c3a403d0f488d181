"""How a model is recorded, predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.config.option import at_least, option
from greenroom.config.tables import check_predictor
from greenroom.errors import UsageError


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """What a recorded trace holds beside the experts."""

    weights: bool = option(False, "record the gate's weights too")
    token_ids: bool = option(False, "record the token ids too")
    gate_inputs: float = option(
        0.0, "record the hidden states that go to the gates, of this share of the tokens", "RATE"
    )
    predict: str | None = option(
        None, "record what these predictors expect, which run beside the model", "NAME[:D],..."
    )
    raw: bool = option(False, "apply no chat template to prompts that are text")

    def __post_init__(self) -> None:
        if not 0 <= self.gate_inputs <= 1:
            raise UsageError(f"--gate-inputs must be from 0 to 1, got {self.gate_inputs}")
        for name in (self.predict or "").split(","):
            if name and "=" not in name.partition(":")[0]:  # an option of the one before
                check_predictor(name)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How the networks of the predictor learned are made."""

    distance: int = option(1, "layers that it looks ahead", "D")
    hidden: int = option(128, "hidden size of each layer's network", "N")
    epochs: int = option(20, "times that each token is looked at", "N")
    held_out: float = option(0.2, "share of the requests that accuracy is measured on", "SHARE")
    seed: int = option(0, "makes the split and the training repeatable", "N")

    def __post_init__(self) -> None:
        for name in ("distance", "hidden", "epochs"):
            at_least(self, name, 1)
        at_least(self, "seed", 0)
        if not 0 < self.held_out < 1:
            raise UsageError(f"--held-out must be above 0 and below 1, got {self.held_out}")


@dataclass(frozen=True, slots=True)
class ContestConfig:
    """How settings are measured against each other."""

    prompts: str | None = option(
        None, "prompts to answer: a line each, or JSON lines (default: six short ones)", "FILE"
    )
    tokens: int = option(48, "tokens of each answer; the first eight are not counted", "N")
    rounds: int = option(5, "times that every setting has its turn", "N")
    seconds: float | None = option(
        None, "begin no further round after this long, but the second", "S"
    )
    raw: bool = option(False, "apply no chat template to prompts that are text")

    def __post_init__(self) -> None:
        if self.tokens < 16:
            raise UsageError(f"--tokens must be at least 16, got {self.tokens}")
        at_least(self, "rounds", 1)
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(f"--seconds must be above 0, got {self.seconds}")
