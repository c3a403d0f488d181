"""Predictors: one a file, and this table.

chosen = predictor("markov:2")
chosen.build(PredictorSetup(shape))
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
OFF = "off"  # what users call `none`
AUTOMATIC = ("next-gate", "markov")  # what `auto` is: the first that model, or trace, allows


def _undecided(setting: PredictorSetup) -> Predictor:
    raise UsageError("predictor auto is none by itself: its driver chooses one")


AUTO = PredictorKind("auto", _undecided, "what pays on this machine with this model")


def predictor(text: str) -> PredictorChoice:
    """The predictor of `NAME[:distance][,option=value...]`, options after a colon or the distance.

    `off` is `none`; what `auto` becomes is for its driver to decide, by `kind is AUTO`. UnknownName
    lists the names that there are; UsageError says which distance or option cannot be right.
    """
    name, colon, rest = text.partition(":")
    known = {AUTO.name: AUTO, OFF: none, **PREDICTORS}
    if name not in known:
        raise UnknownName("predictor", name, known)
    if colon and not rest:
        raise UsageError(f"a distance or options must follow the colon: {text!r}")
    return known[name].choose(rest)


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
