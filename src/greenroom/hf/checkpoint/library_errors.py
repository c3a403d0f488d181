"""Guards around libraries that read untrusted model files: one-line errors, bounded memory."""

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
from greenroom.refusals import refusal_of

LAYERS = re.compile(r"(layers|n_layer|depth|block_count)$")  # keys of configs that count layers
MOST_LAYERS = 1024  # layers that a config may have; more if the checkpoint has more tensors
PARTS = 8  # parameters and modules for each tensor of the checkpoint; models have about two
FREE = 2048  # parameters and modules on top of these; a thousand take 0.3 s
PANIC = "PanicException"  # raised by Rust libraries; it is no subclass of Exception


@contextmanager
def wrap_library_errors(what: str, error: type[GreenroomError] = CheckpointError) -> Iterator[None]:
    """Context manager that turns a library's exceptions into one-line errors of Greenroom.

    An exception is raised again as `error`, with the message `what: message of the exception`.
    What the operating system refuses becomes a DeviceError. Greenroom's own errors and
    KeyboardInterrupt pass unchanged.
    """
    try:
        yield
    except GreenroomError:
        raise
    except BaseException as reason:
        if (refusal := refusal_of(reason)) is not None:
            raise refusal from reason
        if not isinstance(reason, Exception) and type(reason).__name__ != PANIC:
            raise
        raise error(f"{what}: {error_line(reason)}") from reason


def error_line(error: BaseException) -> str:
    """Return an exception's message in one line of at most 300 characters.

    The exception's class is put in front, except for ValueError, RuntimeError and OSError.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    message = " ".join(str(error).split())[:300]
    plain = isinstance(error, ValueError | RuntimeError | OSError) and message
    return message if plain else f"{type(error).__name__}: {message}".rstrip(": ")


def check_layers(config: Mapping[str, Any], tensors: int, where: str) -> None:
    """Raise CheckpointError if a config has more layers than the checkpoint could hold.

    The limit is 1024, or the number of tensors if that is larger. Libraries allocate lists with an
    entry for each layer before they read any tensor, so a damaged config could exhaust memory.
    `where` is the message's prefix.
    """
    most = max(tensors, MOST_LAYERS)
    for key, value in config.items():
        if isinstance(value, dict):
            check_layers(value, tensors, where)
        elif type(value) in (int, float) and LAYERS.search(key) and value > most:
            raise CheckpointError(
                f"{where}: {key} in the config is {value:.0f}, but the checkpoint has only"
                f" {tensors} tensors"
            )


@contextmanager
def bounded_construction(tensors: int, where: str) -> Iterator[None]:
    """Context manager that stops the construction of a far too large model.

    Raises CheckpointError once the modules and parameters constructed in this thread exceed 2048
    plus 8 for each of the checkpoint's `tensors`. `where` is the message's prefix.
    """
    left, thread = FREE + PARTS * tensors, threading.get_ident()

    def count(*registered: object) -> None:
        nonlocal left
        left -= threading.get_ident() == thread
        if left < 0:
            raise CheckpointError(
                f"{where}: the config describes a far larger model than the checkpoint's {tensors}"
                " tensors can fill"
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
