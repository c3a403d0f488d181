"""Stage 1 of loading: find the model that is meant, and the devices that compute it."""

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
    """(where a model came from, the model on the meta device, whether a GPU computes it).

    Only headers are read. UnknownName, UsageError or DeviceError for options that cannot be;
    NotAModel, NotMoE, UnsupportedModel or CheckpointError."""
    policy(config.policy).check_online()
    predictor(config.prefetch)
    gpu = on_a_gpu(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    checkpoint = find_checkpoint(source)
    return ModelSource.of(checkpoint, config.dtype), ModelSkeleton.of(checkpoint, config.dtype), gpu


def on_a_gpu(config: LoadConfig) -> bool:
    """Whether the experts are computed on a GPU: where it is asked for, or there is one.

    DeviceError where there is none, UsageError for options that go with one only.
    """
    there, (kind, numbers) = torch.cuda.is_available(), parse_device(config.device)
    if kind == "cuda" and not there:
        built = torch.version.cuda or torch.version.hip
        reason = "no GPU answers" if built else "this torch was built without CUDA"
        raise DeviceError(f"--device {config.device}: {reason}; --device cpu computes here")
    if kind == "cuda" and max(numbers) > 0 and max(numbers) >= (count := torch.cuda.device_count()):
        known = ", ".join(f"cuda:{number}" for number in range(count))
        raise DeviceError(f"--device {config.device}: the GPUs here are {known}")
    chosen = kind == "cuda" or (kind == "auto" and there)
    if config.host_memory is not None and not (chosen or kind == "fake"):
        raise UsageError("--host-memory is for a GPU: on a CPU, --memory is all there is")
    if config.kernels == GPU_KERNEL and not (chosen or kind == "fake"):
        raise UsageError(
            "--kernels triton computes on a GPU: take numba or eager, or --device cuda"
        )
    return chosen
