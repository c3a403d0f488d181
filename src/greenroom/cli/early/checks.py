"""What is wrong with the options of a run, as far as it shows before torch is imported."""

from __future__ import annotations

import os
from importlib.metadata import version
from importlib.util import find_spec

from greenroom.config import LoadConfig, parse_device
from greenroom.errors import DeviceError, PredictorError, UsageError


def check_early(config: LoadConfig) -> None:
    """UsageError, PredictorError or DeviceError. What this cannot know yet is checked by load."""
    if ":" in config.policy:
        from greenroom.policies import policy

        policy(config.policy)
    if ":" in config.prefetch:
        from greenroom.predictors import predictor

        predictor(config.prefetch)
    _check_predictor(config)
    if config.pin is not None:
        _readable(config.pin, UsageError, "cannot read {}: {}")
    _check_device(config)
    if config.kv in ("int4", "int2") and find_spec("optimum") is None:
        raise UsageError(
            f"--kv {config.kv} needs optimum-quanto (pip install optimum-quanto); --kv fp8 needs"
            " nothing"
        )


def _check_predictor(config: LoadConfig) -> None:
    name = config.prefetch.partition(":")[0]
    if config.predictor is None:
        if name == "learned":
            raise UsageError("--prefetch learned needs --predictor FILE: train-predictor makes one")
        return
    if name not in ("auto", "learned", "off", "none"):
        raise UsageError("--predictor is the file of the predictor learned: name that one too")
    _readable(config.predictor, PredictorError, "{}: cannot be read: {}")


def _check_device(config: LoadConfig) -> None:
    kind, _ = parse_device(config.device)
    if kind == "cuda" and version("torch").endswith("+cpu"):
        raise DeviceError(
            f"--device {config.device}: this torch was built without CUDA; --device cpu computes"
            " here"
        )
    if kind == "cpu" and config.kernels == "triton":
        raise UsageError(
            "--kernels triton computes on a GPU: take numba or eager, or --device cuda"
        )
    if kind == "cpu" and config.kv == "offloaded":
        raise UsageError(
            "--kv offloaded keeps what is a GPU's in host memory: on a CPU it is there already"
        )


def _readable(path: str, error: type[UsageError] | type[PredictorError], text: str) -> None:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as reason:
        raise error(text.format(path, reason.strerror)) from reason
