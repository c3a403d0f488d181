"""Triton's interpreter, made faster: a launch replaces the language's functions once.

The interpreter replaces them at each call of a function within a kernel too, by a search of all
that the language has, which is a third of the time of tests that are marked `interpreted`.
"""

from __future__ import annotations

from typing import Any


def replace_functions_once() -> None:
    """Let calls within a kernel replace no functions where its launch has."""
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    replace: Any = getattr(interpreter, "_patch_lang", None)
    scope: Any = getattr(interpreter, "_LangPatchScope", None)
    if replace is None or scope is None:  # another version
        return

    def replace_once(function: Any) -> Any:
        names = function.__globals__.values()
        modules = [each for each in (language, language.core) if any(each is x for x in names)]
        if any(language.core.is_builtin(each.load) for each in modules):
            return replace(function)
        return scope()

    interpreter._patch_lang = replace_once
