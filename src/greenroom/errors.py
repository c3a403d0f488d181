"""Every error that Greenroom raises on purpose.

GreenroomError            one clear line; the command line prints it and exits with code 2
+-- UsageError            a flag, name or value that cannot be right (also a ValueError)
|   +-- UnknownName       a policy, kernel, device ... that does not exist; lists those that do
|   +-- BudgetError       the memory asked for is too small; says how much would do
|   +-- TooLong           the prompt, or the prompt and the answer asked for, has no room
+-- ModelError            the model cannot be served
|   +-- NotAModel         the folder or hub id holds no model, or cannot be had
|   +-- NotMoE            a dense model: there are no experts to stream
|   +-- UnsupportedModel  an architecture, layout or file format that is not served, and why
|   +-- CheckpointError   a damaged checkpoint: a shard, header, shape or type is wrong
+-- TraceError            a trace that is damaged, of another version, or cannot be right
+-- PredictorError        a predictor that is damaged, another model's, or impossible here
+-- StoreError            reading an expert failed while answering (its cause is the disk's own)
+-- DeviceError           the device refused memory or a copy
+-- Interrupted           a pass was given up, since nobody waits for it any more
+-- ProfileError          a machine profile that is damaged, or of another version
+-- OutputError           a file could not be written (full disk, no permission)
+-- VerifyError           the outputs differ where they must not
+-- ClosedError           the model was detached, or its threads have ended
"""

from __future__ import annotations

from collections.abc import Iterable


class GreenroomError(Exception):
    """Base of all errors that a user can understand and act on."""


class UsageError(GreenroomError, ValueError):
    """A flag, name or value that cannot be right."""


class UnknownName(UsageError):
    """A name that is in no table; the message lists the names that are."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}: choose one of {', '.join(known)}")


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


class DeviceError(GreenroomError):
    """The device refused memory or a copy."""


class Interrupted(GreenroomError):
    """A pass was given up, since nobody waits for it any more."""


class ProfileError(GreenroomError):
    """A machine profile that cannot be read: damaged, or of another version."""


class OutputError(GreenroomError):
    """A file could not be written."""


class VerifyError(GreenroomError):
    """The outputs differ where they must not."""


class ClosedError(GreenroomError):
    """The model was detached, or its threads have ended."""
