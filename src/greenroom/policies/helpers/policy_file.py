"""Eviction policies from Python files that are not part of Greenroom."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import ModuleType

from greenroom.core.policy import Policy
from greenroom.errors import UsageError

SUFFIX = ".py"


def load_policy(path: Path) -> Policy:
    """Load the eviction policy that a Python file defines as its variable `policy`.

    The file is executed, once for each content of the file. UsageError if it cannot be read or
    executed, or if it defines no policy.
    """
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UsageError(f"the policy {path} cannot be read: {error.strerror}") from error
    # The name has a digest of the content, so that compiled code of an earlier content is not used.
    name = f"greenroom_policy_{path.stem}_{hashlib.sha256(source).hexdigest()[:16]}"
    module = sys.modules.get(name) or _execute(name, path, source)
    policy = getattr(module, "policy", None)
    if not isinstance(policy, Policy):
        raise UsageError(
            f"{path} defines no policy: its variable `policy` must be a"
            " greenroom.core.policy.Policy"
        )
    return policy


def _execute(name: str, path: Path, source: bytes) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = str(path.resolve())
    sys.modules[name] = module  # compiled code that is read from disk refers to its classes
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except Exception as error:
        del sys.modules[name]
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{path} fails with {type(error).__name__}: {reason}") from error
    return module
