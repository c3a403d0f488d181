"""Kinds of expert predictors, the user's choice of one, and the arguments to build it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from numpy.typing import NDArray

from greenroom.core.policy import PolicyOption
from greenroom.core.predictor import Gates, Predictor, Shape
from greenroom.errors import UnknownName, UsageError

# Inputs that a driver has to supply: `token_ids` of a pass, `inputs` of a layer, and in the setup
# the model's `gates`, the tensors of a `file`, or a `trace`.
Need = Literal["token_ids", "inputs", "gates", "file", "trace"]


@dataclass(frozen=True)
class PredictorSetup:
    """Arguments to build an expert predictor; a kind's unneeded arguments may be left out."""

    shape: Shape
    seed: int = 0
    gates: Gates | None = None
    routed_experts: NDArray[Any] | None = None  # the trace's, [tokens, layers, top_k]
    predictions: Mapping[str, Any] = field(default_factory=dict)  # the trace's predictions
    tensors: Mapping[str, NDArray[Any]] | None = None  # the tensors of a predictor's file
    distance: int | None = None  # it and the options are set by `PredictorChoice.build`
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ahead(self) -> int:
        """Return the prediction distance in layers, 0 without one; check it against the model.

        UsageError where the model has fewer layers.
        """
        distance = self.distance or 0
        if distance > self.shape.layers:
            raise UsageError(
                f"the model has {self.shape.layers} MoE layers:"
                f" predictors cannot look {distance} ahead"
            )
        return distance


Builder = Callable[[PredictorSetup], Predictor]


@dataclass(frozen=True)
class PredictorKind:
    """Kind of expert predictor: its name, its constructor and the arguments it needs.

    `distance` is the default; None where it cannot be chosen: the predictor predicts complete
    passes before they begin, or its recording or file has a distance.
    """

    name: str
    build: Builder
    help: str
    needs: frozenset[Need] = frozenset()
    distance: int | None = None
    options: tuple[PolicyOption, ...] = ()

    def choose(self, text: str = "") -> PredictorChoice:
        """Parse the distance and options of a predictor of this kind. UsageError for wrong ones.

        The text is `[distance][,option=value...]`.
        """
        first, *items = text.split(",") if text else [""]
        options = {option.name: option for option in self.options}
        distance = self.distance
        if first and "=" not in first:
            distance = self._distance(first)
        elif first:
            items = [first, *items]
        elif items:
            raise UsageError(
                f"a distance or options must follow the colon of predictor {self.name}: {text!r}"
            )
        values: dict[str, Any] = {}
        for item in items:
            name, equals, value = item.partition("=")
            if name not in options:
                if not options:
                    raise UsageError(f"predictor {self.name} has no options: {item!r}")
                raise UnknownName(f"option of {self.name}", name, options)
            if not equals or name in values:
                raise UsageError(f"options of {self.name} are given once, as name=value: {item!r}")
            values[name] = options[name].parse(self.name, value)
        defaults = {name: option.default for name, option in options.items()}
        return PredictorChoice(
            self, f"{self.name}:{text}" if text else self.name, distance, defaults | values
        )

    def _distance(self, text: str) -> int:
        if self.distance is None:
            raise UsageError(f"predictor {self.name} has no distance to choose: {text!r}")
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"the distance of {self.name} must be a whole number from 1: {text!r}")
        return int(text)


@dataclass(frozen=True)
class PredictorChoice:
    """User's choice of a predictor: a kind with distance and options; `name` is the text."""

    kind: PredictorKind
    name: str
    distance: int | None
    options: Mapping[str, Any]

    def build(self, setup: PredictorSetup) -> Predictor:
        """Build the chosen predictor. UsageError where the setup lacks an argument."""
        return self.kind.build(replace(setup, distance=self.distance, options=self.options))
