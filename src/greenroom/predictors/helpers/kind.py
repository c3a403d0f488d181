"""What is known of a predictor before it is made: its kind, the choice of one, and its setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from numpy.typing import NDArray

from greenroom.core.policy import PolicyOption
from greenroom.core.predictor import Gates, Predictor, Shape
from greenroom.errors import UnknownName, UsageError

# What a driver has to give: `token_ids` with each pass, `inputs` with each layer seen, and in the
# setting the model's `gates`, the weights of a `file`, a `trace`.
Need = Literal["token_ids", "inputs", "gates", "file", "trace"]


@dataclass(frozen=True)
class PredictorSetup:
    """What predictors are made from; what a kind does not need may be left out."""

    shape: Shape
    seed: int = 0
    gates: Gates | None = None
    routed_experts: NDArray[Any] | None = None  # the trace's, [tokens, layers, top_k]
    predictions: Mapping[str, Any] = field(default_factory=dict)  # the trace's predictions
    tensors: Mapping[str, NDArray[Any]] | None = None  # the tensors of a predictor's file
    distance: int | None = None  # this and the options are filled in by `Choice.make`
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ahead(self) -> int:
        """The distance, 0 for kinds that have none. UsageError where the model has fewer layers."""
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
    """A predictor by name: how one is made, and what that needs.

    `distance` is the default; None where a predictor does not choose one: it predicts whole passes
    before they begin, or its recording says.
    """

    name: str
    build: Builder
    help: str
    needs: frozenset[Need] = frozenset()
    distance: int | None = None
    options: tuple[PolicyOption, ...] = ()

    def choose(self, text: str = "") -> PredictorChoice:
        """This kind with `[distance][,option=value...]`. UsageError where one cannot be right."""
        first, *rest = text.split(",") if text else [""]
        known = {option.name: option for option in self.options}
        distance = self.distance
        if first and "=" not in first:
            distance = self._distance(first)
        elif first:
            rest = [first, *rest]
        elif rest:
            raise UsageError(f"{self.name} is followed by a distance or options: {text!r}")
        values: dict[str, Any] = {}
        for item in rest:
            name, equals, value = item.partition("=")
            if name not in known:
                if not known:
                    raise UsageError(f"predictor {self.name} has no options: {item!r}")
                raise UnknownName(f"option of {self.name}", name, known)
            if not equals or name in values:
                raise UsageError(f"options of {self.name} are given once, as name=value: {item!r}")
            values[name] = known[name].parse(self.name, value)
        defaults = {name: option.default for name, option in known.items()}
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
    """A kind, and how far and in which manner it shall look. `name` is what the user wrote."""

    kind: PredictorKind
    name: str
    distance: int | None
    options: Mapping[str, Any]

    def build(self, setting: PredictorSetup) -> Predictor:
        """One predictor, new. UsageError where the setting lacks what it needs."""
        return self.kind.build(replace(setting, distance=self.distance, options=self.options))
