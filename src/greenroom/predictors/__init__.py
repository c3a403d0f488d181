"""Table of expert predictors, which predict the experts of a model's next layers.

A predictor is chosen by its text and built for a model's shape:

    predictor("markov:2").build(PredictorSetup(shape))
"""

from __future__ import annotations

from greenroom.core.predictor import Predictor
from greenroom.errors import UnknownName, UsageError
from greenroom.predictors.eamc import eamc
from greenroom.predictors.helpers.kind import PredictorChoice, PredictorKind, PredictorSetup
from greenroom.predictors.learned import learned
from greenroom.predictors.markov import markov
from greenroom.predictors.next_gate import next_gate
from greenroom.predictors.noisy_oracle import noisy_oracle
from greenroom.predictors.none import none
from greenroom.predictors.oracle import oracle
from greenroom.predictors.popularity import popularity
from greenroom.predictors.pregated import pregated
from greenroom.predictors.recorded import recorded
from greenroom.predictors.routing_path import routing_path
from greenroom.predictors.token import token

PREDICTORS: dict[str, PredictorKind] = {
    kind.name: kind
    for kind in (
        none,
        *(popularity, token, markov, eamc, routing_path),
        *(next_gate, learned),
        *(pregated, recorded, oracle, noisy_oracle),
    )
}
OFF = "off"  # the users' name of `none`
AUTOMATIC = ("next-gate", "markov")  # `auto` is the first that the model, or the trace, allows


def _undecided(setup: PredictorSetup) -> Predictor:
    raise UsageError("predictor auto works with a model or a trace only: name another predictor")


AUTO = PredictorKind("auto", _undecided, "what pays on this machine with this model")


def predictor(text: str) -> PredictorChoice:
    """Parse the choice of an expert predictor: `NAME[:[distance][,option=value...]]`.

    An option may directly follow the colon. `off` means `none`; `auto` has the kind `AUTO`, for
    which the caller chooses a predictor. Raises UnknownName for an unknown predictor or option,
    UsageError for a wrong distance or value.
    """
    name, colon, options = text.partition(":")
    kinds = {AUTO.name: AUTO, OFF: none, **PREDICTORS}
    if name not in kinds:
        raise UnknownName("predictor", name, kinds)
    if colon and not options:
        raise UsageError(
            f"nothing follows the colon in predictor {text!r}: add a distance or name=value, or"
            " leave out the colon"
        )
    return kinds[name].choose(options)


__all__ = [
    "AUTO",
    "AUTOMATIC",
    "OFF",
    "PREDICTORS",
    "PredictorChoice",
    "PredictorKind",
    "PredictorSetup",
    "predictor",
]
