"""Every error that Greenroom raises on purpose.

GreenroomError            one clear line; the command line prints it and exits with code 2
+-- UsageError            a flag, name or value that cannot be right (also a ValueError)
|   +-- UnknownName       a policy, kernel, device ... that does not exist; lists those that do
|   |   +-- UnknownOption  an option of a Python function that does not exist (also a TypeError)
|   +-- BudgetError       the memory asked for is too small; says how much would do
|   +-- UnsupportedCall   what a model cannot do while its experts are streamed; says what can
|   +-- TooLong           the prompt, or the prompt and the answer asked for, has no room
+-- ModelError            the model cannot be served
|   +-- NotAModel         the folder or hub id holds no model, or cannot be had
|   +-- NotMoE            a dense model: there are no experts to stream
|   +-- UnsupportedModel  an architecture, layout or file format that is not served, and why
|   +-- CheckpointError   a damaged checkpoint: a shard, header, shape or type is wrong
+-- TraceError            a trace that is damaged, of another version, or cannot be right
+-- PredictorError        a predictor that is damaged, another model's, or impossible here
+-- StoreError            reading an expert failed while answering (its cause is the disk's own)
|   +-- CheckpointChanged  a file of the checkpoint was changed while it was served
+-- DeviceError           the device refused memory or a copy
+-- Interrupted           a pass was given up, since nobody waits for it any more
+-- ProfileError          a machine profile that is damaged, or of another version
+-- OutputError           a file could not be written (full disk, no permission)
+-- VersionError          a library is missing, or of a version that is not served
+-- VerifyError           the outputs differ where they must not
+-- PlatformError      not Linux
+-- ClosedError           the model was detached, or its threads have ended
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class GreenroomError(Exception):
    """Base of all errors that a user can understand and act on."""


class UsageError(GreenroomError, ValueError):
    """A flag, name or value that cannot be right."""


class UnknownName(UsageError):
    """A name that is in no table; the message lists the names that are."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        said = repr(name) if len(repr(name)) <= 100 else f"{repr(name)[:97]}..."
        super().__init__(f"unknown {kind} {said}: choose one of {', '.join(known)}")


class UnknownOption(UnknownName, TypeError):
    """A keyword that a Python function does not take; the message names the nearest one."""

    def __init__(self, function: str, name: str, known: Iterable[str]) -> None:
        known = list(known)
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
        UsageError.__init__(self, f"{function}() has no option {name!r}: {hint}")


class UnsupportedCall(UsageError):
    """A call that a model cannot serve while its experts are streamed; says what can be done."""


class BudgetError(UsageError):
    """The memory asked for cannot hold what must be in it."""


class TooLong(UsageError):
    """The prompt, or the prompt and the answer asked for, has no room in the context."""


class ModelError(GreenroomError):
    """The model cannot be served."""


class NotAModel(ModelError):
    """The folder or hub id holds no model, or cannot be had."""


class NotMoE(ModelError):
    """A dense model: it has no experts to stream."""


class UnsupportedModel(ModelError):
    """An architecture, layout or file format that is not served; the message says why."""


class CheckpointError(ModelError):
    """A damaged checkpoint: a missing or truncated shard, a bad header, a wrong shape or type."""


class TraceError(GreenroomError):
    """A trace that is damaged, of another version, or holds what no model can have routed."""


class PredictorError(GreenroomError):
    """A predictor that is damaged, another model's, or asks what this model cannot say."""


class StoreError(GreenroomError):
    """Reading an expert failed while answering; the disk's own error is the cause."""


class CheckpointChanged(StoreError):
    """A file of the checkpoint was changed while it was served; the message names it."""


class DeviceError(GreenroomError):
    """The device refused memory or a copy."""


class Interrupted(GreenroomError):
    """A pass was given up, since nobody waits for it any more."""


class ProfileError(GreenroomError):
    """A machine profile that cannot be read: damaged, or of another version."""


class OutputError(GreenroomError):
    """A file could not be written."""


class VersionError(GreenroomError):
    """A library that is missing, or whose version is outside the range that is served."""


class VerifyError(GreenroomError):
    """The outputs differ where they must not."""


class PlatformError(GreenroomError):
    """This is another system than Linux."""


class ClosedError(GreenroomError):
    """The model was detached, or its threads have ended."""
