"""Deferred imports, with small packages that note when they are executed."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from greenroom.cli.early.deferred import Decorator, DeferringFinder, Group, Placeholder, Wrapper

FILES = {
    "notes.py": "executed = []",
    "heavy/__init__.py": """
        import notes; notes.executed.append(__name__)
        from heavy.shapes import Shape
        registered = []
        def register(function):
            registered.append(function)
            return function
        def wrap(function, recursive=True):
            def inner(*args):
                return "wrapped", function(*args)
            inner.mark, inner.own_id = "excluded", id(inner)
            return inner
        def area(shape): return shape.width
        limit = 3
    """,
    "heavy/shapes.py": """
        import notes; notes.executed.append(__name__)
        class Shape:
            width = 1
            def __init__(self, width=2): self.width = width
        table = {"a": 1}
    """,
    "heavy/other.py": "import notes; notes.executed.append(__name__)",
    "free/__init__.py": """
        import sys, types, notes
        notes.executed.append(__name__)
        class Lazy(types.ModuleType):
            def __getattr__(self, name):
                if name == "answer":
                    return 42
                raise AttributeError(name)
        sys.modules[__name__] = Lazy(__name__)
    """,
    "free/part.py": "value = 7",
    "user/__init__.py": "",
    "user/code.py": """
        import heavy
        from heavy import area, Shape
        from heavy.shapes import table
        kinds = [Shape]
        @heavy.register
        def one(): return 1
        @heavy.wrap
        def two(): return 2
        three = heavy.wrap(None, True)(lambda: 3)
        def is_shape(thing): return isinstance(thing, Shape)
    """,
}


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """The group of `heavy`, deferred for the package `user`."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        lines = text.split("\n")
        path.write_text("\n".join(line.removeprefix(" " * 8) for line in lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    names: dict[str, type[Placeholder]] = {"Shape": Placeholder, "area": Placeholder}
    heavy = Group(
        {
            "heavy": names | {"register": Decorator, "wrap": Wrapper},
            "heavy.shapes": {"Shape": Placeholder, "table": Placeholder},
        },
        "user",
    )
    finder = DeferringFinder([heavy, Group({"free": {}}, "user")], free=["free"])
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield heavy
    for name in set(sys.modules) - before:
        del sys.modules[name]


def load(name: str) -> Any:
    return importlib.import_module(name)


def executed() -> list[str]:
    return load("notes").executed


def test_an_import_executes_nothing(group: Group) -> None:
    code = load("user.code")
    assert isinstance(load("heavy"), ModuleType)
    assert executed() == []
    assert not code.is_shape(3)
    assert code.one() == 1
    assert code.two() == 2
    assert code.three() == 3
    assert code.two.__name__ == "two"
    assert executed() == []
    assert group.deferred


@pytest.mark.parametrize(
    "use",
    [
        "code.Shape()", "code.Shape.width", "code.table['a']", "'a' in code.table",
        "list(code.table)", "len(code.table)", "code.Shape | None", "None | code.Shape",
        "code.area(code.Shape(5))", "code.heavy.limit", "type('Sub', (), {}) and code.heavy.Shape",
        "__import__('heavy.other')", "vars(code) and setattr(code.heavy, 'limit', 4)",
        "code.heavy.register(print)", "dir(code.heavy.shapes.Shape)",
    ],
)  # fmt: skip
def test_any_use_executes_the_real_modules_once(group: Group, use: str) -> None:
    code = load("user.code")
    eval(use, {"code": code})
    assert sorted(n for n in executed() if n != "heavy.other") == ["heavy", "heavy.shapes"]
    assert executed().count("heavy.other") == (1 if "other" in use else 0)
    real = load("heavy")
    assert type(real) is ModuleType
    assert code.Shape is real.Shape is load("heavy.shapes").Shape
    assert code.table is load("heavy.shapes").table
    assert not [v for v in vars(code).values() if isinstance(v, Placeholder)]
    assert code.heavy.limit == real.limit == (4 if "setattr" in use else 3)


def test_decorators_are_applied_when_their_module_is_imported(group: Group) -> None:
    code = load("user.code")
    two = code.two
    real = load("heavy")
    assert real.limit == 3  # asked of the stand-in
    assert load("heavy").registered == [code.one]
    assert two() == ("wrapped", 2)
    assert code.three() == ("wrapped", 3)
    assert two.mark == "excluded"
    assert two.own_id == id(two)
    assert code.heavy.wrap(code.one)() == ("wrapped", 1)


def test_a_placeholder_is_right_for_isinstance_and_subclasses(group: Group) -> None:
    shape = load("user.code").kinds[0]
    assert not isinstance(1, shape)
    assert not issubclass(int, shape)
    assert executed() == []
    sub = type(load("user.code"))("sub")
    exec("class Square(shape): pass", {"shape": shape}, vars(sub))
    assert issubclass(sub.Square, load("heavy").Shape)
    assert issubclass(sub.Square, shape)
    assert isinstance(sub.Square(), shape)
    assert not isinstance(1, shape)


def test_other_packages_get_the_real_thing(group: Group) -> None:
    load("heavy")
    from heavy import Shape  # type: ignore[import-not-found]

    assert isinstance(Shape, type)
    assert not group.deferred


def test_an_unknown_name_is_imported_and_logged(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    heavy = load("heavy")
    caplog.set_level(logging.DEBUG, "greenroom.cli.early.deferred")
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        heavy.missing  # noqa: B018
    assert [r.getMessage() for r in caplog.records] == ["importing heavy: heavy.missing is used"]
    assert not group.deferred


def test_a_free_package_is_not_executed_for_its_modules(group: Group) -> None:
    assert load("free.part").value == 7
    free = load("free")
    assert free.part.value == 7
    assert executed() == []
    assert free.answer == 42
    assert executed() == ["free"]
    assert load("free").answer == 42


def test_a_module_that_is_missing_is_missing(group: Group) -> None:
    with pytest.raises(ModuleNotFoundError):
        load("heavy.nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from heavy import nothing")


def test_threads_that_use_a_stand_in_at_once_get_one_module(group: Group) -> None:
    code, start, seen = load("user.code"), threading.Barrier(4), []

    def use() -> None:
        start.wait()
        seen.append((code.kinds[0].width, code.heavy.limit))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [(1, 3)] * 4
    assert sorted(executed()) == ["heavy", "heavy.shapes"]
