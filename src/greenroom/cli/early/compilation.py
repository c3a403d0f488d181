"""Compilation of kernels in a second process, while libraries are imported."""

from __future__ import annotations

from pathlib import Path

from greenroom.config import Amount, LoadConfig
from greenroom.json_file import JsonObject, Malformed, read

ROOM = 2 << 30  # bytes; with less the second process could break the budget


def compile_ahead(model: str, config: LoadConfig) -> None:
    """Start to compile kernels in a second process, before the model is loaded.

    Nothing is compiled with a memory budget below 2 GiB, for GPUs, eager kernels or float32.
    """
    if config.device.startswith("cuda"):  # Triton compiles there, when the model is loaded
        return
    from greenroom.runtime.kernels import precompile
    from greenroom.runtime.memory.system import available_bytes

    available = available_bytes()
    budget = available
    if config.memory not in (None, "auto"):
        budget = Amount.parse(config.memory, "--memory").of(available)
    dtype = config.dtype if config.dtype != "auto" else _dtype(Path(model) / "config.json")
    if config.kernels != "eager" and budget >= ROOM and dtype in ("bfloat16", "float16"):
        precompile.start_compiling(dtype)


def _dtype(config: Path) -> str:
    """Return the data type in a model's config.json; bfloat16 if the config does not say."""
    try:
        stored = JsonObject(read(config, unique=False)).values
        return str(stored.get("dtype") or stored.get("torch_dtype") or "bfloat16")
    except (OSError, Malformed):  # loading reports it
        return "bfloat16"
