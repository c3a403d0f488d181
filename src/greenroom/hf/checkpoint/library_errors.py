"""Guards around libraries that read a model's files: uniform errors, bounded work."""

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
MOST_LAYERS = 1024  # layers that a config may have; more if the checkpoint has more tensors
PARTS = 16  # parameters and modules for each tensor of the checkpoint; models have about two
FREE = 2048  # parameters and modules on top of these
PANIC = "PanicException"  # raised by Rust libraries; it is no subclass of Exception


@contextmanager
def wrap_library_errors(what: str, error: type[GreenroomError] = CheckpointError) -> Iterator[None]:
    """Context manager that turns a library's exceptions into one-line errors of Greenroom.

    `error` is the class raised, `what` the prefix.

    Greenroom's own errors, errors of the disk or of memory and interrupts pass unchanged.
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
    """Return an exception's message in one line, with the exception's class where needed."""
    message = " ".join(str(error).split())[:300]
    plain = isinstance(error, ValueError | RuntimeError | OSError) and message
    return message if plain else f"{type(error).__name__}: {message}".rstrip(": ")


def check_layers(config: Mapping[str, Any], tensors: int, where: str) -> None:
    """Raise CheckpointError where a config has more layers than the checkpoint could hold.

    Libraries allocate lists of that length before they look for any tensor.
    """
    most = max(tensors, MOST_LAYERS)
    for key, value in config.items():
        if isinstance(value, dict):
            check_layers(value, tensors, where)
        elif type(value) in (int, float) and LAYERS.search(key) and value > most:
            raise CheckpointError(
                f"{where}: {key} is {value:.0f}, but the checkpoint has only {tensors} tensors"
            )


@contextmanager
def bounded_construction(tensors: int, where: str) -> Iterator[None]:
    """Context manager that raises CheckpointError once a constructed model has too many parts.

    `tensors`: how many the checkpoint has.
    """
    left, thread = FREE + PARTS * tensors, threading.get_ident()

    def count(*registered: object) -> None:
        nonlocal left
        left -= threading.get_ident() == thread
        if left < 0:
            raise CheckpointError(
                f"{where}: its config describes a far larger model than {tensors} tensors can fill"
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
