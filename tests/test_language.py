"""The language of the package: names that say nothing, and docstrings that lean on their place.

`python tests/test_language.py [PATH ...]` lists what is to be reworded below these paths.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/greenroom"

# Never a name by itself: participles, pronouns and adverbs without a noun.
ALONE = {
    "alone", "apart", "asked", "beside", "found", "given", "gone", "goes", "heard", "held", "here",
    "kept", "known", "made", "means", "noted", "own", "rest", "said", "says", "seen", "spoken",
    "stays", "such", "taken", "there", "these", "this", "those", "told", "together", "wanted",
    "whole",
}  # fmt: skip
# Never part of a name: private words for which the field has a term.
PRIVATE = {
    "buddies": "substitutes", "buddy": "substitute", "contest": "benchmark rounds",
    "evidence": "workload", "heard": "observed", "kept": "by meaning: pinned, cached, stored",
    "lessened": "approximated", "lesser": "approximate", "loan": "borrowed slot",
    "loans": "borrowed slots", "seat": "staging slot or secondary slot", "seats": "staging slots",
    "told": "configured", "voice": "chat backend", "wave": "expert group",
    "waves": "expert groups", "wish": "prefetch candidate", "wishes": "prefetch candidates",
    "words": "kernel arguments",
}  # fmt: skip
# A first line that begins so has no noun of its own.
LEANING = re.compile(
    r"(What|Who|Whose|Whether|That|Those|These|This|Which|Where|When|It|Its|They|Such|Of|So|As|Had"
    r"|The same|Is told|Has|Says|Said|Seen|Told|Kept|Made|Given|Asked|Found|Until|Once|No|By|In|On"
    r"|For|From|With|Without|Beside|Also|Not|Nothing|Everything|Anything|All that|One that|Only)\b"
)
MOST_WORDS = 15
Place = tuple[str, int]


def parts_of(name: str) -> list[str]:
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def wrong_name(name: str) -> str | None:
    """Why a name cannot stay, if so."""
    bare = name.strip("_").lower()
    if bare in ALONE:
        return f"{name}: a name is a noun, or a verb with an object"
    for part in parts_of(name):
        if part in PRIVATE:
            return f"{name}: {part} is called {PRIVATE[part]}"
    return None


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a file defines: classes, functions, arguments, variables, fields, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def public_docstrings(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """(name, line, docstring) of the module, its public classes and functions, their methods."""
    if found := ast.get_docstring(tree):
        yield "", 1, found
    todo: list[ast.Module | ast.ClassDef] = [tree]
    while todo:
        for node in todo.pop().body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_"):
                continue
            if text := ast.get_docstring(node):
                yield node.name, node.lineno, text
            if isinstance(node, ast.ClassDef):
                todo.append(node)


def wrong_docstring(text: str) -> str | None:
    """Why a docstring's first line does not make sense alone in an index, if so."""
    first = text.splitlines()[0]
    if LEANING.match(first):
        return f"begins without a noun or a verb: {first}"
    sentence = re.split(r"(?<=[.:;!?])\s", first)[0]
    if len(sentence.split()) > MOST_WORDS or (sentence == first and first[-1] not in ".:;!?"):
        return (
            f"the first sentence has over {MOST_WORDS} words, or does not end in its line: {first}"
        )
    return None


def wrong_in(file: Path) -> list[str]:
    """What is to be reworded in a file, a line each."""
    tree, where = ast.parse(file.read_text()), file.relative_to(ROOT)
    seen: dict[str, int] = {}
    for name, line in names_in(tree):
        if why := wrong_name(name):
            seen.setdefault(why, line)
    out = [f"{where}:{line}: {why}" for why, line in seen.items()]
    for name, line, text in public_docstrings(tree):
        if why := wrong_docstring(text):
            out.append(f"{where}:{line}: {name or 'module'}: {why}")
    name = file.stem if file.stem != "__init__" else file.parent.name
    if why := wrong_name(name):
        out.append(f"{where}: file {why}")
    return out


def python_files(*paths: Path) -> list[Path]:
    return sorted(f for path in paths for f in ([path] if path.is_file() else path.rglob("*.py")))


def same_names(files: list[Path]) -> list[str]:
    """Public classes of one package that share a name."""
    where = defaultdict(list)
    for file in files:
        inside = file.relative_to(PACKAGE).parts
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[inside[0], node.name].append("/".join(inside))
    return [f"{name}: {', '.join(all_of)}" for (_, name), all_of in where.items() if all_of[1:]]


def test_names_and_first_lines_make_sense_alone():
    wrong = [line for file in python_files(PACKAGE) for line in wrong_in(file)]
    assert not wrong, "\n".join(["reword:", *wrong])


def test_public_classes_of_a_package_have_names_of_their_own():
    assert not same_names(python_files(PACKAGE))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("kept", True), ("_found", True), ("kept_bytes", True), ("WaveGroup", True),
     ("found_match", False), ("resident", False), ("ComputeGroup", False)],
)  # fmt: skip
def test_a_name_is_judged(name, wrong):
    assert bool(wrong_name(name)) is wrong


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("What a run takes that is told nothing.", True), ("Slots of one tier.", False),
     ("A buffer that grows to the largest request that it has had and is aligned to pages of"
      " the caller.", True),
     ("A first sentence that goes on\nin the second line.", True), ("Whether it pays.", True)],
)  # fmt: skip
def test_a_docstring_is_judged(text, wrong):
    assert bool(wrong_docstring(text)) is wrong


if __name__ == "__main__":
    paths = [Path(each).resolve() for each in sys.argv[1:]] or [PACKAGE]
    files = python_files(*paths)
    lines = [line for file in files for line in wrong_in(file)]
    lines += same_names([file for file in files if file.is_relative_to(PACKAGE)])
    print("\n".join(lines))
    print(len(lines), "to reword")
