"""After `compile_predictor`, predictions compile and load no more machine code."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

from numba.core.dispatcher import Dispatcher

from greenroom.predictors import PREDICTORS, PredictorSetup, predictor
from greenroom.predictors.helpers.compiling import LEARNS_FROM_ROUTING, compile_predictor
from tests.predictors.small import SHAPE, routing, run_predictor

NAMES = sorted(
    name
    for name, kind in PREDICTORS.items()
    if not kind.needs - LEARNS_FROM_ROUTING and name != "none"
)


def compiled_versions() -> int:
    """Count the compiled or loaded versions of all Numba functions in this process."""
    return sum(len(each.overloads) for each in gc.get_objects() if isinstance(each, Dispatcher))


def late_compilations() -> dict[str, int]:
    """Count the versions that each predictor's first predictions compile or load."""
    late = {}
    for name in NAMES:
        compile_predictor(predictor(name))
        before = compiled_versions()
        for _ in run_predictor(predictor(name).build(PredictorSetup(SHAPE)), routing(tokens=20)):
            pass
        late[name] = compiled_versions() - before
    return late


def test_nothing_is_compiled_in_the_first_token() -> None:
    """Run in a new process, since other tests may have compiled the functions in this one."""
    code = (
        "import json; from tests.predictors.test_compiling import late_compilations;"
        " print(json.dumps(late_compilations()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == dict.fromkeys(NAMES, 0)
    assert len(NAMES) >= 4
