"""The tree that the docstring draws is the tree of the classes."""

from __future__ import annotations

import re

import pytest

from greenroom import errors
from greenroom.errors import GreenroomError, UnknownName, UsageError


def drawn() -> dict[str, str]:
    """Class -> base, as the docstring draws it."""
    parents, tree = {}, {-1: "Exception"}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"((?:\|   )*(?:\+-- )?)([A-Z]\w+) {2,}\S", line):
            depth = len(match[1]) // 4
            tree[depth] = match[2]
            parents[match[2]] = tree[depth - 1]
    return parents


def classes() -> dict[str, type[BaseException]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }


def test_the_tree_in_the_docstring_is_that_of_the_classes() -> None:
    assert drawn() == {name: kind.__bases__[0].__name__ for name, kind in classes().items()}


@pytest.mark.parametrize("name", sorted(classes()))
def test_each_is_a_greenroom_error_and_says_what_it_is(name: str) -> None:
    kind = classes()[name]
    assert issubclass(kind, GreenroomError)
    assert kind.__doc__


def test_a_mistake_is_also_a_value_error() -> None:
    assert issubclass(UsageError, ValueError)
    assert str(UnknownName("policy", "x", ["a", "b"])) == "unknown policy 'x': choose one of a, b"
