"""Choose a loaded model's expert predictors, and find the routers and gates they need."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from transformers import PreTrainedModel

from greenroom.core.layout import Catalog
from greenroom.core.predictor import Predictor, Shape
from greenroom.errors import PredictorError, UsageError
from greenroom.hf.memory.budget import experts_per_token
from greenroom.plan.history.files import load_predictor
from greenroom.predictors import AUTO, AUTOMATIC, PredictorChoice, PredictorSetup, predictor
from greenroom.runtime.probes import GateInputProbe, Router, RouterGates, find_routers, top_k_of


@dataclass(frozen=True, slots=True)
class ModelPredictors:
    """Expert predictors that run with a model, and the routers whose inputs they need.

    `routers` is empty where no inputs are captured.
    """

    shape: Shape
    routers: list[Router]
    predictors: dict[str, Predictor]

    def capture_inputs(self) -> GateInputProbe | None:
        """Begin to capture the routers' inputs for predictors; None where none needs them."""
        return GateInputProbe(self.routers) if self.routers else None


def build_predictors(
    model: PreTrainedModel,
    catalog: Catalog,
    chosen: Sequence[PredictorChoice],
    *,
    file: str | os.PathLike[str] | None = None,
    fingerprint: str = "",
    inputs: bool = False,
) -> ModelPredictors:
    """Make expert predictors for a model.

    `file` is that of the predictor `learned`. `inputs` captures the routers' inputs though no
    predictor needs them. UsageError or PredictorError, in one line, where a predictor cannot run
    with this model.
    """
    if chosen or inputs:
        _check_passes(model)
    needs = _needs(chosen, file)
    captures = "inputs" in needs or inputs
    routers: list[Router] = []
    if captures or chosen:
        with nullcontext() if "inputs" in needs else suppress(PredictorError):
            routers = find_routers(model, catalog.layers)
    top_k = experts_per_token(model)  # the config's, where the router does not show it
    with suppress(PredictorError):
        top_k = top_k_of(routers[0]) if routers else top_k
    learned = load_predictor(file, fingerprint) if file is not None else None
    gates = RouterGates(routers) if "gates" in needs else None
    shape = Shape(catalog.experts_per_layer, top_k)
    setting = PredictorSetup(shape, gates=gates, tensors=learned)
    predictors = {choice.name: choice.build(setting) for choice in chosen}
    return ModelPredictors(shape, routers if captures else [], predictors)


def check_prefetch(
    model: PreTrainedModel,
    catalog: Catalog,
    prefetch: str,
    file: str | os.PathLike[str] | None,
    fingerprint: str,
) -> None:
    """Check the options `--prefetch` and `--predictor` before weights are loaded.

    UsageError or PredictorError, in one line.
    """
    choice = _choice(prefetch, file)
    if choice.kind is AUTO or choice.kind.name == "none":  # --predictor may be for trace record
        return
    _check_passes(model)
    needs = _needs([choice], file)
    shape = Shape(catalog.experts_per_layer, 0)
    if choice.distance is not None:
        _ = PredictorSetup(shape, distance=choice.distance).ahead  # or UsageError
    if "file" in needs:
        if file is None:
            raise UsageError(
                "--prefetch learned needs --predictor FILE, made by `greenroom train-predictor`"
            )
        load_predictor(file, fingerprint)
    if "inputs" in needs:
        for router in find_routers(model, catalog.layers):
            if "gates" in needs:
                router.arguments()


def _check_passes(model: PreTrainedModel) -> None:
    """Check that a model's passes run all layers, as predictors expect; UsageError otherwise."""
    if model.config.is_encoder_decoder:
        raise UsageError(
            f"{type(model).__name__} is an encoder-decoder: each pass goes through a part of the"
            " layers, and predictors need passes through all: use --prefetch off"
        )


def _needs(chosen: Sequence[PredictorChoice], file: object) -> frozenset[str]:
    """Return the inputs that predictors need; UsageError where a run cannot have them."""
    needs = frozenset[str]().union(*(choice.kind.needs for choice in chosen))
    if file is not None and "file" not in needs:
        raise UsageError("--predictor FILE is for the predictor learned: add --prefetch learned")
    for choice in chosen:
        if "trace" in choice.kind.needs:
            raise UsageError(
                f"predictor {choice.name} needs a recorded trace: it runs in `greenroom simulate`"
                " only"
            )
    return needs


def prefetch_predictors(
    model: PreTrainedModel,
    catalog: Catalog,
    prefetch: str,
    file: str | os.PathLike[str] | None,
    fingerprint: str,
) -> ModelPredictors | None:
    """Return the expert predictor that `--prefetch` names, if any.

    `auto` is the first of AUTOMATIC that works.
    """
    choice = _choice(prefetch, file)
    if choice.kind.name == "none":
        return None
    if choice.kind is not AUTO:
        return build_predictors(model, catalog, [choice], file=file, fingerprint=fingerprint)
    for name in AUTOMATIC:
        try:
            return build_predictors(model, catalog, [predictor(name)])
        except PredictorError:
            continue
    raise AssertionError("one of them needs nothing of the model")


def _choice(prefetch: str, file: object) -> PredictorChoice:
    """Return the predictor that `--prefetch` names; with a file, `auto` is `learned`."""
    choice = predictor(prefetch)
    return predictor("learned") if choice.kind is AUTO and file is not None else choice
