"""Kinds of expert predictors, a user's choice of one, and the arguments to build it."""

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
    """Arguments to build an expert predictor.

    A kind of predictor uses only some arguments (`PredictorKind.needs`); the others may be left
    out. The distance and the options are set by `PredictorChoice.build`.
    """

    shape: Shape
    seed: int = 0
    gates: Gates | None = None
    routed_experts: NDArray[Any] | None = None  # the trace's, [tokens, layers, top_k]
    predictions: Mapping[str, Any] = field(default_factory=dict)  # the trace's predictions
    tensors: Mapping[str, NDArray[Any]] | None = None  # the tensors of a predictor's file
    distance: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ahead(self) -> int:
        """Return how many layers ahead a predictor predicts; 0 if it has no distance.

        Raises UsageError if the model has fewer layers.
        """
        distance = self.distance or 0
        if distance > self.shape.layers:
            raise UsageError(
                f"the model has {self.shape.layers} MoE layers, so a predictor cannot predict"
                f" {distance} layers ahead: choose a distance of at most {self.shape.layers}"
            )
        return distance


TWICE, ALL = "twice", "all"
WIDTH = PolicyOption(
    "width", TWICE, "ranks of a prediction: twice top-k, or all experts", choices=(TWICE, ALL)
)


Builder = Callable[[PredictorSetup], Predictor]


@dataclass(frozen=True)
class PredictorKind:
    """Kind of expert predictor: its name, its constructor and the arguments it needs.

    `distance` is the default number of layers to predict ahead. None means that a user cannot
    choose the distance: the predictor predicts complete passes before they begin, or the distance
    is stored in its trace or file. `replays_routing` means that without a model, the experts that a
    trace used are its predictions.
    """

    name: str
    build: Builder
    help: str
    needs: frozenset[Need] = frozenset()
    distance: int | None = None
    options: tuple[PolicyOption, ...] = ()
    replays_routing: bool = False

    def choose(self, text: str = "") -> PredictorChoice:
        """Parse a distance and options: the text `[distance][,option=value...]`.

        Raises UsageError for a wrong distance or value, UnknownName for an unknown option.
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
                f"a distance or name=value must follow the colon of predictor {self.name}, not"
                f" {text!r}"
            )
        values: dict[str, Any] = {}
        for item in items:
            name, equals, value = item.partition("=")
            if name not in options:
                if not options:
                    raise UsageError(f"predictor {self.name} has no options: leave out {item!r}")
                raise UnknownName(f"option of {self.name}", name, options)
            if not equals or name in values:
                raise UsageError(
                    f"{item!r}: give each option of predictor {self.name} once, as name=value"
                )
            values[name] = options[name].parse(self.name, value)
        defaults = {name: option.default for name, option in options.items()}
        return PredictorChoice(
            self, f"{self.name}:{text}" if text else self.name, distance, defaults | values
        )

    def _distance(self, text: str) -> int:
        if self.distance is None:
            raise UsageError(f"predictor {self.name} has no distance to choose: leave out {text!r}")
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(
                f"the distance of predictor {self.name} is {text!r}: it must be a number of layers,"
                " at least 1"
            )
        return int(text)


@dataclass(frozen=True)
class PredictorChoice:
    """A user's choice of an expert predictor: a kind with a distance and options.

    `name` is the user's text, such as `markov:2`.
    """

    kind: PredictorKind
    name: str
    distance: int | None
    options: Mapping[str, Any]

    def build(self, setup: PredictorSetup) -> Predictor:
        """Build the chosen expert predictor.

        Raises UsageError if the setup lacks an argument that the kind needs.
        """
        return self.kind.build(replace(setup, distance=self.distance, options=self.options))
