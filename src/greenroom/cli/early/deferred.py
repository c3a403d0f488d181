"""Deferral of imports: a stand-in takes the place of a module until something of it is used.

The real module is imported, with the others of its group, as soon as anything but an import is
asked of the stand-in. Names that were imported from it are placeholders until then.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

log = logging.getLogger(__name__)
_LOCK = threading.Lock()  # held while stand-ins are removed, never while modules are imported


class Group:
    """Modules that are deferred together.

    modules: by module, the names that may be placeholders, and the class of their placeholders
    user:    the package whose modules get placeholders
    """

    def __init__(self, modules: Mapping[str, Mapping[str, type[Placeholder]]], user: str) -> None:
        self.modules, self.user, self.deferred = modules, user, True
        self._actions: list[Callable[[], object]] = []

    def on_import(self, action: Callable[[], object]) -> bool:
        """Call a function after the import; returns False if the group is no longer deferred."""
        with _LOCK:
            if self.deferred:
                self._actions.append(action)
            return self.deferred

    def load(self, reason: str) -> None:
        """Import the deferred modules, and put real objects in the place of placeholders."""
        with _LOCK:
            if not self.deferred:
                return
            self.deferred = False
            names = [name for name in self.modules if type(sys.modules.get(name)) is StandIn]
            for name in names:
                parent, _, child = name.rpartition(".")
                del sys.modules[name]
                if parent in sys.modules:
                    vars(sys.modules[parent]).pop(child, None)
        log.debug("importing %s: %s", ", ".join(names), reason)
        for name in names:
            import_module(name)
        for action in self._actions:
            action()
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == self.user and isinstance(module, ModuleType):
                for key, value in list(vars(module).items()):
                    if isinstance(value, Placeholder) and value.group is self:
                        vars(module)[key] = value.real()


def _import(name: str) -> Any:
    """Import a module whose group is no longer deferred."""
    with _LOCK:
        if type(sys.modules.get(name)) is StandIn:  # another thread imported it meanwhile
            del sys.modules[name]
    return import_module(name)


class StandIn(ModuleType):
    """A module that is not imported yet."""

    def __getattr__(self, name: str) -> Any:
        if name in ("__path__", "__file__", "__cached__"):  # the import itself asks for them
            raise AttributeError(name)
        group: Group = self.__spec__.loader_state  # type: ignore[union-attr]
        kind = group.modules[self.__name__].get(name) if group.deferred else None
        if kind is not None and (kind is not Placeholder or _importer() == group.user):
            return kind(group, self.__name__, name)
        group.load(f"{self.__name__}.{name} is used")
        return getattr(_import(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or value is sys.modules.get(f"{self.__name__}.{name}"):
            return super().__setattr__(name, value)  # the import's own
        self.__spec__.loader_state.load(f"{self.__name__}.{name} is set")  # type: ignore[union-attr]
        return setattr(_import(self.__name__), name, value)


def _importer() -> str:
    """Return the top-level package of the code that asks a stand-in for a name."""
    frame = sys._getframe(2)
    while frame.f_back and "importlib" in frame.f_globals.get("__name__", ""):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


class Placeholder:
    """A class, function or object of a module that is not imported yet; any use imports it."""

    def __init__(self, group: Group, module: str, name: str) -> None:
        self.group, self._module, self._name = group, module, name

    def real(self) -> Any:
        self.group.load(f"{self._module}.{self._name} is used")
        return getattr(_import(self._module), self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real(), name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.real(),)

    def __instancecheck__(self, instance: object) -> bool:  # before the import there is none
        return not self.group.deferred and isinstance(instance, self.real())

    def __subclasscheck__(self, other: type) -> bool:
        return not self.group.deferred and issubclass(other, self.real())


def _forward(name: str) -> Callable[..., Any]:
    """Make a method of placeholders that calls this special method of the real object."""

    def method(self: Placeholder, *args: Any, **options: Any) -> Any:
        real = self.real()
        return getattr(type(real), name)(real, *args, **options)

    return method


for _name in ("call", "contains", "getitem", "iter", "len", "or", "ror"):
    setattr(Placeholder, f"__{_name}__", _forward(f"__{_name}__"))


class Decorator(Placeholder):
    """A decorator that returns the function it is given; it is applied when it is imported."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        if args and args[0] is None:
            return lambda function: self(function, *args[1:], **options)

        def decorate() -> Any:
            return self.real()(*args, **options)

        if args and isinstance(args[0], FunctionType) and self.group.deferred:
            return self.later(args[0], decorate)
        return decorate()

    def later(self, function: FunctionType, decorate: Callable[[], Any]) -> Any:
        """Decorate a function after the import."""
        return function if self.group.on_import(decorate) else decorate()


class Wrapper(Decorator):
    """A decorator that wraps a function; until it is imported, the function is called as it is."""

    def later(self, function: FunctionType, decorate: Callable[[], Any]) -> Any:
        target: Any = function

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            return target(*args, **options)

        def wrap() -> None:
            nonlocal target
            target = decorate()
            marks = vars(target).items()  # some are the wrapper's own identity
            vars(call).update({k: id(call) if v == id(target) else v for k, v in marks})

        return call if self.group.on_import(wrap) else decorate()


class DeferringFinder(MetaPathFinder, Loader):
    """Finder and loader of stand-ins.

    free: packages whose modules are imported without the package's own code
    """

    def __init__(self, groups: Iterable[Group], free: Iterable[str] = ()) -> None:
        self._groups = {name: group for group in groups for name in group.modules}
        self._free = frozenset(free)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        group, parent = self._groups.get(name), name.rpartition(".")[0]
        if group is None:
            if parent not in self._free and type(sys.modules.get(parent)) is StandIn:
                self._groups[parent].load(f"{name} is imported")
                if name in sys.modules:
                    return ModuleSpec(name, _Existing())
            return None
        real = PathFinder.find_spec(name, path) if group.deferred else None
        if real is None:
            return None
        spec = ModuleSpec(name, self, origin=real.origin, loader_state=group)
        spec.submodule_search_locations = real.submodule_search_locations
        spec.has_location = real.has_location
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing: the module is a stand-in."""


class _Existing(Loader):
    """Loader of a module that was imported while its finder was asked for it."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = sys.modules[spec.name]
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
