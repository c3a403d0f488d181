"""The names that are checked before anything is imported are those of the tables."""

from __future__ import annotations

import subprocess
import sys

import pytest

from greenroom.config import LoadConfig, RecordConfig
from greenroom.config.tables import (
    POLICIES,
    PREDICTORS,
    SYSTEMS,
    TRACE_POLICIES,
    TRACE_PREDICTORS,
)
from greenroom.errors import UnknownName, UsageError
from greenroom.plan.systems.table import SYSTEMS as SYSTEM_TABLE
from greenroom.policies import POLICIES as POLICY_TABLE
from greenroom.predictors import PREDICTORS as PREDICTOR_TABLE


def test_policies() -> None:
    needs = {name: policy.needs_trace for name, policy in POLICY_TABLE.items()}
    assert set(TRACE_POLICIES) == {name for name in needs if needs[name]}
    assert set(POLICIES) == {"auto", *needs} - set(TRACE_POLICIES)


def test_systems() -> None:
    assert tuple(SYSTEM_TABLE) == SYSTEMS


def test_predictors() -> None:
    needs = {name: "trace" in kind.needs for name, kind in PREDICTOR_TABLE.items()}
    assert set(TRACE_PREDICTORS) == {name for name in needs if needs[name]}
    assert set(PREDICTORS) == {"auto", "off", *needs} - set(TRACE_PREDICTORS)


@pytest.mark.parametrize(("option", "absent"), [("policy", "opt"), ("prefetch", "oracle")])
def test_a_run_offers_only_what_it_takes(option: str, absent: str) -> None:
    with pytest.raises(UnknownName) as error:
        LoadConfig(**{option: "nope"})
    assert "markov" in str(error.value) or "llru" in str(error.value)
    assert absent not in str(error.value)
    with pytest.raises(UsageError, match="greenroom simulate"):
        LoadConfig(**{option: absent})


def test_predictors_to_record() -> None:
    assert RecordConfig(predict="markov:2,next-gate").predict
    with pytest.raises(UsageError, match="oracle needs a recorded trace"):
        RecordConfig(predict="markov,oracle")


REFUSED = [
    (["--policy", "nope"], "choose one of auto, lru"),
    (["--policy", "moe-infinity:capacity=x"], "must be a whole number"),
    (["--prefetch", "oracle"], "needs a recorded trace"),
    (["--prefetch", "markov:0"], "must be a number of layers, at least 1"),
    (["--prefetch", "learned"], "needs --predictor FILE"),
    (["--predictor", "/nowhere"], "/nowhere: the predictor's file cannot be read"),
    (["--pin", "/nowhere"], "cannot read /nowhere"),
    (["--kernels", "triton", "--device", "cpu"], "triton needs a GPU"),
    (["--kv", "offloaded", "--device", "cpu"], "--device is cpu: leave out --kv"),
]


def test_what_a_run_refuses_is_refused_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from greenroom.cli import main\n"
        f"for options in {[options for options, _ in REFUSED]}:\n"
        "    assert main(['run', 'demo', 'x', *options]) == 2\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    for (_, message), line in zip(REFUSED, ran.stderr.splitlines(), strict=True):
        assert message in line
