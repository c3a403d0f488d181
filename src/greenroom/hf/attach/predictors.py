"""Build a model's expert predictors, and find the routers that they observe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from transformers import PreTrainedModel

from greenroom.config.values import WORKER
from greenroom.core.layout import Catalog
from greenroom.core.predictor import Predictor, Shape
from greenroom.errors import PredictorError, UsageError
from greenroom.hf.memory.budget import experts_per_token
from greenroom.hf.mtp.layer import without_mtp
from greenroom.hf.variants.catalog import ExpertVariants
from greenroom.hf.variants.predictor import VariantPredictor
from greenroom.plan.history.files import load_predictor
from greenroom.predictors import AUTO, AUTOMATIC, PredictorChoice, PredictorSetup, predictor
from greenroom.predictors.learned import NEXT_GATE
from greenroom.runtime.probes import GateInputProbe, Router, RouterGates, find_routers, top_k_of


@dataclass(frozen=True, slots=True)
class ModelPredictors:
    """Expert predictors that run with a model, by name, and the routers that they observe.

    shape:      number of experts in each layer, and experts per token
    routers:    the routers whose inputs are captured; empty if no predictor needs inputs
    predictors: predictor by its name
    """

    shape: Shape
    routers: list[Router]
    predictors: dict[str, Predictor]

    def capture_inputs(self) -> GateInputProbe | None:
        """Return a probe that captures routers' inputs; None if no predictor needs them."""
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
    """Build the chosen expert predictors for a model.

    file:        file of the predictor `learned`, as `greenroom train-predictor` writes it
    fingerprint: digest of the checkpoint; a file for another checkpoint is refused
    inputs:      capture the routers' inputs even if no predictor needs them

    Raises UsageError or PredictorError if a predictor cannot run with this model.
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
    gated = learned is not None and NEXT_GATE in learned
    gates = RouterGates(routers) if gated or "gates" in needs else None
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
    """Check that a model can use the options `--prefetch` and `--predictor`, before loading.

    Raises UsageError or PredictorError if it cannot.
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
                "--prefetch learned needs a file: make one with `greenroom train-predictor`, and"
                " give --predictor FILE"
            )
        if NEXT_GATE in load_predictor(file, fingerprint):
            needs |= {"gates"}
    if "inputs" in needs:
        for router in find_routers(model, catalog.layers):
            if "gates" in needs:
                router.arguments()


def _check_passes(model: PreTrainedModel) -> None:
    """Check that a model's passes run all layers, as predictors expect; UsageError otherwise."""
    if model.config.is_encoder_decoder:
        raise UsageError(
            f"{type(model).__name__} is an encoder-decoder model, and expert predictors work only"
            " with decoder-only models: use --prefetch off"
        )


def _needs(chosen: Sequence[PredictorChoice], file: object) -> frozenset[str]:
    """Return the names of data that predictors need; UsageError if a run does not have them."""
    needs = frozenset[str]().union(*(choice.kind.needs for choice in chosen))
    if file is not None and "file" not in needs:
        raise UsageError(
            "--predictor FILE works only with --prefetch learned: add --prefetch learned"
        )
    for choice in chosen:
        if "trace" in choice.kind.needs:
            raise UsageError(
                f"predictor {choice.name} needs a recorded trace: it works only in"
                " `greenroom simulate`: choose another with --prefetch"
            )
    return needs


def prefetch_predictors(
    model: PreTrainedModel,
    catalog: Catalog,
    prefetch: str,
    file: str | os.PathLike[str] | None,
    fingerprint: str,
) -> ModelPredictors | None:
    """Build the expert predictor that `--prefetch` names; None for `off`.

    For `auto`, the first predictor that works with the model is taken, in the order `next-gate`,
    `markov`. Raises UsageError or PredictorError if the named predictor does not work with it.
    """
    choice, catalog = _choice(prefetch, file), without_mtp(catalog)
    if choice.kind.name == "none":
        return None
    if choice.kind is not AUTO:
        return build_predictors(model, catalog, [choice], file=file, fingerprint=fingerprint)
    for name in AUTOMATIC:
        try:
            return build_predictors(model, catalog, [predictor(name)])
        except PredictorError:
            continue
    raise AssertionError("no automatic predictor works: markov should work with any model")


def running_predictor(
    predictors: ModelPredictors | None, variants: ExpertVariants | None
) -> tuple[str, Predictor | None]:
    """Return the name of the predictor that runs with a model, and the predictor.

    If the model has variants, it predicts their stored experts. ("", None) without a predictor.
    """
    if predictors is None:
        return "", None
    name, predictor = next(iter(predictors.predictors.items()))
    return name, predictor if variants is None else VariantPredictor(predictor, variants)


def runs_in_worker(predictor: Predictor | None, predict_in: str, on_gpu: bool) -> bool:
    """Check whether a predictor gets a thread of its own, by the option `--predict-in`.

    With `auto`, a costly predictor does if a GPU computes the experts (ProMoE, 4.4). On a CPU both
    threads share the cores, and tokens took 2 % longer.
    """
    if predictor is None:
        return False
    return predictor.costly and on_gpu if predict_in == "auto" else predict_in == WORKER


def _choice(prefetch: str, file: object) -> PredictorChoice:
    """Return the predictor that `--prefetch` names; with `--predictor`, `auto` means `learned`."""
    choice = predictor(prefetch)
    return predictor("learned") if choice.kind is AUTO and file is not None else choice
