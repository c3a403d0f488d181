"""Whether modules are still what compiled code took them for.

That is asked before every token, of a thousand small objects, on caches that the weights have just
emptied. So nothing is looked up then: kept are the dictionaries themselves, and what stood in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

from torch import nn
from torch.nn.modules import module as every

# Of those who listen to all modules.
EVERY: tuple[Mapping[Any, Any], ...] = (
    every._global_forward_hooks, every._global_forward_pre_hooks,
)  # fmt: skip


class ModuleCheck:
    """What has to be so of some modules."""

    def __init__(self) -> None:
        self._empty: list[Mapping[Any, Any]] = [*EVERY]
        self._where: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []

    def unheard(self, module: nn.Module) -> None:
        """Nobody listens to its forward."""
        self._empty += (module._forward_hooks, module._forward_pre_hooks)

    def same(self, where: Any, name: str, value: object) -> None:
        """A dictionary has this very object under a name; None: it may have nothing."""
        self._where.append(where)
        self._names.append(name)
        self._values.append(value)

    def weight(self, module: nn.Module) -> None:
        """Its weight is the parameter that it is now."""
        self.same(module._parameters, "weight", module._parameters["weight"])

    def include(self, other: ModuleCheck) -> None:
        """All of another's too."""
        self._empty += other._empty[len(EVERY) :]
        self._where += other._where
        self._names += other._names
        self._values += other._values

    def holds(self) -> bool:
        """Is all of it so?"""
        return not any(self._empty) and all(
            map(is_, map(dict.get, self._where, self._names), self._values)
        )
