"""Stage 1 of loading: find the checkpoint, and decide whether a GPU computes the experts."""

from __future__ import annotations

import torch

from greenroom.config import LoadConfig, parse_device
from greenroom.errors import DeviceError, UsageError
from greenroom.hf.checkpoint.resolve import find_checkpoint
from greenroom.hf.checkpoint.source import ModelSource
from greenroom.hf.model.skeleton import ModelSkeleton
from greenroom.hf.variants.index import adapters_of
from greenroom.policies import policy
from greenroom.predictors import predictor
from greenroom.runtime.kernels.table import GPU_KERNEL


def resolve(
    source: str, config: LoadConfig, mtp: bool = False, variants: bool = False
) -> tuple[ModelSource, ModelSkeleton, bool]:
    """Find a model's checkpoint, and build the model on the meta device.

    Returns (source, skeleton, whether a GPU computes the experts). A hub id that is not in the
    local cache is downloaded; of local files, only config and tensor headers are read. `mtp` adds
    the checkpoint's MTP layer; with `variants` the model is served beside its adapters. Also
    sets torch's number of threads if `--threads` is given.

    Raises UnknownName, UsageError or DeviceError for impossible options, and NotAModel, NotMoE,
    UnsupportedModel or CheckpointError for a model that cannot be loaded.
    """
    policy(config.policy).check_online()
    predictor(config.prefetch)
    gpu = on_a_gpu(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    checkpoint = find_checkpoint(source, config.config)
    adapters = adapters_of(config, variants)
    skeleton = ModelSkeleton.of(checkpoint, config.dtype, mtp, adapters, config.only_experts)
    return ModelSource.of(skeleton.checkpoint, config.dtype), skeleton, gpu


def on_a_gpu(config: LoadConfig) -> bool:
    """Decide whether a GPU computes the experts: `--device cuda`, or `auto` with CUDA.

    Raises DeviceError if the requested GPU does not exist, and UsageError if `--host-memory` or
    `--kernels triton` is given without a GPU.
    """
    available, (kind, numbers) = torch.cuda.is_available(), parse_device(config.device)
    if kind == "cuda" and not available:
        built = torch.version.cuda or torch.version.hip
        reason = "no GPU was found" if built else "this torch was built without CUDA"
        raise DeviceError(f"--device {config.device}: {reason}; use --device cpu")
    if kind == "cuda" and max(numbers) > 0 and max(numbers) >= (count := torch.cuda.device_count()):
        numbered = ", ".join(f"cuda:{number}" for number in range(count))
        raise DeviceError(f"--device {config.device}: no such GPU; this machine has {numbered}")
    chosen = kind == "cuda" or (kind == "auto" and available)
    if config.host_memory is not None and not (chosen or kind == "fake"):
        raise UsageError(
            "--host-memory needs a GPU: on a CPU, --memory limits the memory of the process"
        )
    if config.kernels == GPU_KERNEL and not (chosen or kind == "fake"):
        raise UsageError(
            "--kernels triton needs a GPU: use --kernels native or eager, or --device cuda"
        )
    return chosen
