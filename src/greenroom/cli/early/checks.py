"""Checks of a run's options that do not need torch, and so fail early."""

from __future__ import annotations

import os
from importlib.metadata import version

from greenroom.config import LoadConfig, parse_device
from greenroom.errors import DeviceError, PredictorError, UsageError


def check_early(config: LoadConfig) -> None:
    """Check options of loading a model before torch is imported; loading checks the rest.

    UsageError for a wrong option, PredictorError for a predictor's file that cannot be read, and
    DeviceError for a GPU with a torch that was built without CUDA.
    """
    if ":" in config.policy:
        from greenroom.policies import policy

        policy(config.policy)
    if ":" in config.prefetch:
        from greenroom.predictors import predictor

        predictor(config.prefetch)
    _check_predictor(config)
    if config.pin is not None:
        _readable(config.pin, UsageError, "cannot read {}, the file of --pin: {}")
    _check_device(config)


def _check_predictor(config: LoadConfig) -> None:
    name = config.prefetch.partition(":")[0]
    if config.predictor is None:
        if name == "learned":
            raise UsageError(
                "--prefetch learned needs --predictor FILE, made by `greenroom train-predictor`"
            )
        return
    if name not in ("auto", "learned", "off", "none"):
        raise UsageError(
            f"--predictor FILE is for --prefetch learned, but --prefetch is {config.prefetch}: give"
            " --prefetch learned, or leave out --predictor"
        )
    _readable(config.predictor, PredictorError, "{}: the predictor's file cannot be read: {}")


def _check_device(config: LoadConfig) -> None:
    kind, _ = parse_device(config.device)
    if kind == "cuda" and version("torch").endswith("+cpu"):
        raise DeviceError(
            f"--device {config.device}: this torch was built without CUDA; use --device cpu, or"
            " install torch with CUDA"
        )
    if kind == "cpu" and config.kernels == "triton":
        raise UsageError(
            "--kernels triton needs a GPU: use --kernels native or eager, or --device cuda"
        )
    if kind == "cpu" and config.kv == "offloaded":
        raise UsageError(
            "--kv offloaded keeps a GPU's KV cache in main memory, but --device is cpu: leave out"
            " --kv"
        )


def _readable(path: str, error: type[UsageError] | type[PredictorError], text: str) -> None:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as reason:
        raise error(text.format(path, reason.strerror)) from reason
