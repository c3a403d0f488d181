"""After `compile_predictor`, predicting makes no more machine code ready."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

from numba.core.dispatcher import Dispatcher

from greenroom.predictors import PREDICTORS, PredictorSetup, predictor
from greenroom.predictors.helpers.compiling import LEARNS_FROM_ROUTING, compile_predictor
from tests.predictors.small import SHAPE, routing, said

OWN = sorted(
    name
    for name, kind in PREDICTORS.items()
    if not kind.needs - LEARNS_FROM_ROUTING and name != "none"
)


def ready() -> int:
    """Compiled or loaded versions of all of Numba's functions in this process."""
    return sum(len(each.overloads) for each in gc.get_objects() if isinstance(each, Dispatcher))


def late() -> dict[str, int]:
    """For each predictor: versions that its first predictions made ready."""
    found = {}
    for name in OWN:
        compile_predictor(predictor(name))
        before = ready()
        for _ in said(predictor(name).build(PredictorSetup(SHAPE)), routing(tokens=20)):
            pass
        found[name] = ready() - before
    return found


def test_nothing_is_compiled_in_the_first_token() -> None:
    """In a process of its own: other tests may have made everything ready here."""
    code = (
        "import json; from tests.predictors.test_compiling import late; print(json.dumps(late()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == dict.fromkeys(OWN, 0)
    assert len(OWN) >= 4
