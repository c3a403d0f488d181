"""Exception classes of all errors that Greenroom raises on purpose.

GreenroomError            base class: a message of one line, which commands print (exit code 2)
+-- UsageError            a flag, name or value that is not valid (also a ValueError)
|   +-- UnknownName       a policy, kernel or other name that does not exist; lists the valid ones
|   |   +-- UnknownOption  an option of a Python function that does not exist (also a TypeError)
|   +-- BudgetError       the requested memory is too small; says how much is enough
|   +-- UnsupportedCall   a call that a model with streamed experts cannot serve
|   +-- TooLong           the prompt and the requested answer are longer than the context
+-- ModelError            the model cannot be served
|   +-- NotAModel         the folder or hub id holds no model, or cannot be reached
|   +-- NotMoE            a dense model: there are no experts to stream
|   +-- UnsupportedModel  an architecture, layout or file format that is not supported, and why
|   +-- CheckpointError   a damaged checkpoint: a shard, header, shape or type is wrong
+-- TraceError            a trace that is damaged, of another version, or has impossible routing
+-- PredictorError        a predictor that is damaged, or made for another model
+-- StoreError            reading an expert failed while answering (its cause is the disk's error)
|   +-- CheckpointChanged  a file of the checkpoint changed while the model was in use
+-- DeviceError           the GPU failed, or the system refused memory or a thread
+-- Interrupted           a forward pass was stopped, because nobody waits for its result
+-- ProfileError          a machine profile that is damaged, or of another version
+-- OutputError           a file could not be written (disk full, no permission)
+-- VersionError          a library is missing, or of an unsupported version
+-- VerifyError           outputs that must be equal differ
+-- PlatformError         the operating system is not Linux
+-- ClosedError           the model was detached, or its threads have ended
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class GreenroomError(Exception):
    """Base class of all errors that Greenroom raises on purpose, with a message for users."""


class UsageError(GreenroomError, ValueError):
    """A command-line option, name or option value that is not valid."""


FORMER_KERNELS: dict[object, str] = {"numba": "native"}  # former name -> today's


class UnknownName(UsageError):
    """A policy, kernel or other name that does not exist; the message lists valid names."""

    def __init__(self, kind: str, name: object, choices: Iterable[str]) -> None:
        if kind in ("kernel", "kernels") and name in FORMER_KERNELS:
            super().__init__(f"kernels {name!r} are now called {FORMER_KERNELS[name]!r}")
            return
        text = repr(name) if len(repr(name)) <= 100 else f"{repr(name)[:97]}..."
        super().__init__(f"unknown {kind} {text}: choose one of {', '.join(choices)}")


class UnknownOption(UnknownName, TypeError):
    """A keyword argument that a function does not take; the message suggests valid ones."""

    def __init__(self, function: str, name: str, options: Iterable[str]) -> None:
        options = list(options)
        near = get_close_matches(name, options, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(options)}"
        UsageError.__init__(self, f"{function}() has no option {name!r}: {hint}")


class UnsupportedCall(UsageError):
    """A call that a model cannot serve while its experts are streamed from disk."""


class BudgetError(UsageError):
    """The requested memory is too small; the message says what is needed."""


class TooLong(UsageError):
    """The prompt and the requested answer are longer than the model's context."""


class ModelError(GreenroomError):
    """The model cannot be loaded or run."""


class NotAModel(ModelError):
    """The folder or hub id holds no model, or cannot be reached."""


class NotMoE(ModelError):
    """A dense model: without experts, there is nothing to stream."""


class UnsupportedModel(ModelError):
    """An unsupported architecture, layout or file format; the message says why."""


class CheckpointError(ModelError):
    """A damaged checkpoint: a missing or truncated shard, a bad header, a wrong shape or type."""


class TraceError(GreenroomError):
    """A trace that is damaged, of another version, or has impossible routing."""


class PredictorError(GreenroomError):
    """A predictor that is damaged, or was made for another model.

    Also raised where this model lacks the inputs that the predictor needs.
    """


class StoreError(GreenroomError):
    """Reading an expert failed while answering; the disk's error is the cause."""


class CheckpointChanged(StoreError):
    """A file of the checkpoint changed while the model was in use; the message names it."""


class DeviceError(GreenroomError):
    """The GPU or another device failed, or the operating system refused memory or a thread."""


class Interrupted(GreenroomError):
    """A forward pass was stopped, because nobody waits for its result."""


class ProfileError(GreenroomError):
    """A machine profile that cannot be read: damaged, or of another version."""


class OutputError(GreenroomError):
    """A file that a command writes could not be written."""


class VersionError(GreenroomError):
    """A required library is missing, or its version is not supported."""


class VerifyError(GreenroomError):
    """Outputs that `greenroom verify` expects to be equal differ."""


class PlatformError(GreenroomError):
    """The operating system is not Linux, the only one that Greenroom supports."""


class ClosedError(GreenroomError):
    """The model was detached from Greenroom, or Greenroom's threads have ended."""
