"""Libraries that read a model's files: what they raise is one error of ours, their work bounded."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from greenroom.errors import CheckpointError, GreenroomError

LAYERS = re.compile(r"(layers|n_layer|depth|block_count)$")  # keys of configs that count layers
MOST_LAYERS = 1024  # where a checkpoint has fewer tensors
PARTS = 16  # parameters and modules for a tensor of the checkpoint; models have about two
FREE = 2048  # beyond these
PANIC = "PanicException"  # Rust's, which is no Exception


@contextmanager
def wrap_library_errors(what: str, error: type[GreenroomError] = CheckpointError) -> Iterator[None]:
    """Turn whatever a library raises about files into one line of `error`, after `what`.

    Errors of ours, of the disk and of memory pass, and so does an interruption.
    """
    try:
        yield
    except (GreenroomError, MemoryError):
        raise
    except BaseException as reason:
        from_library = isinstance(reason, Exception) or type(reason).__name__ == PANIC
        if not from_library or (isinstance(reason, OSError) and reason.errno is not None):
            raise
        raise error(f"{what}: {error_line(reason)}") from reason


def error_line(error: BaseException) -> str:
    """What an error says, in one line, with its kind where that says more than its text."""
    said = " ".join(str(error).split())[:300]
    plain = isinstance(error, ValueError | RuntimeError | OSError) and said
    return said if plain else f"{type(error).__name__}: {said}".rstrip(": ")


def check_layers(config: Mapping[str, Any], tensors: int, where: str) -> None:
    """CheckpointError where a config, or a part of it, asks for more layers than there can be.

    Libraries make lists of that length before any tensor is looked for.
    """
    most = max(tensors, MOST_LAYERS)
    for key, value in config.items():
        if isinstance(value, dict):
            check_layers(value, tensors, where)
        elif type(value) in (int, float) and LAYERS.search(key) and value > most:
            raise CheckpointError(
                f"{where}: {key} is {value:.0f}, but the checkpoint has {tensors} tensors"
            )


@contextmanager
def bounded_construction(tensors: int, where: str) -> Iterator[None]:
    """CheckpointError as soon as a model that is constructed has far more parts than a checkpoint
    of so many tensors can fill."""
    left, thread = FREE + PARTS * tensors, threading.get_ident()

    def count(*registered: object) -> None:
        nonlocal left
        left -= threading.get_ident() == thread
        if left < 0:
            raise CheckpointError(
                f"{where}: asks for a far larger model than {tensors} tensors can fill"
            )

    hooks = [
        register_module_parameter_registration_hook(count),
        register_module_module_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
