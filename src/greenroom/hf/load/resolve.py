"""Stage 1 of loading: find the model, and decide whether a GPU computes it."""

from __future__ import annotations

import torch

from greenroom.config import LoadConfig, parse_device
from greenroom.errors import DeviceError, UsageError
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.checkpoint.source import ModelSource
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.policies import policy
from greenroom.predictors import predictor
from greenroom.runtime.kernels.table import GPU_KERNEL


def resolve(source: str, config: LoadConfig) -> tuple[ModelSource, ModelSkeleton, bool]:
    """Find a model's source and its skeleton, and decide whether a GPU computes it.

    The skeleton is on the meta device. Only headers are read. UnknownName, UsageError or
    DeviceError for impossible options; NotAModel, NotMoE, UnsupportedModel or CheckpointError for
    the model.
    """
    policy(config.policy).check_online()
    predictor(config.prefetch)
    gpu = on_a_gpu(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    checkpoint = find_checkpoint(source)
    return ModelSource.of(checkpoint, config.dtype), ModelSkeleton.of(checkpoint, config.dtype), gpu


def on_a_gpu(config: LoadConfig) -> bool:
    """Decide whether a GPU computes the experts: requested, or found by `auto`.

    DeviceError where the GPU does not exist, UsageError for options that need one.
    """
    available, (kind, numbers) = torch.cuda.is_available(), parse_device(config.device)
    if kind == "cuda" and not available:
        built = torch.version.cuda or torch.version.hip
        reason = "no GPU was found" if built else "this torch was built without CUDA"
        raise DeviceError(f"--device {config.device}: {reason}; --device cpu computes here")
    if kind == "cuda" and max(numbers) > 0 and max(numbers) >= (count := torch.cuda.device_count()):
        numbered = ", ".join(f"cuda:{number}" for number in range(count))
        raise DeviceError(f"--device {config.device}: the GPUs of this machine are {numbered}")
    chosen = kind == "cuda" or (kind == "auto" and available)
    if config.host_memory is not None and not (chosen or kind == "fake"):
        raise UsageError(
            "--host-memory is for a GPU: on a CPU, --memory is the budget of the process"
        )
    if config.kernels == GPU_KERNEL and not (chosen or kind == "fake"):
        raise UsageError(
            "--kernels triton needs a GPU: use --kernels numba or eager, or --device cuda"
        )
    return chosen
