"""Table of expert predictors, each in its own module.

choice = predictor("markov:2")
choice.build(PredictorSetup(shape))
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
    raise UsageError("predictor auto cannot be built: its driver chooses a predictor")


AUTO = PredictorKind("auto", _undecided, "what pays on this machine with this model")


def predictor(text: str) -> PredictorChoice:
    """Parse a predictor's name with options: `NAME[:distance][,option=value...]`.

    Options follow the colon or the distance.

    `off` is `none`. For `auto` (`kind is AUTO`) the driver chooses a predictor. UnknownName lists
    the valid names; UsageError says which distance or option is wrong.
    """
    name, colon, options = text.partition(":")
    kinds = {AUTO.name: AUTO, OFF: none, **PREDICTORS}
    if name not in kinds:
        raise UnknownName("predictor", name, kinds)
    if colon and not options:
        raise UsageError(f"a distance or options must follow the colon: {text!r}")
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
