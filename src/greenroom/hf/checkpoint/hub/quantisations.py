"""The quantisations of a GGUF repository, and the files that a model's name selects.

Repackagers put a quantisation's label into the name of the file (model-Q4_K_M.gguf,
model.i1-Q4_K_M.gguf, model-UD-Q4_K_XL-00001-of-00002.gguf) or of its folder
(BF16/model-00001-of-00003.gguf).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from posixpath import basename, splitext

from greenroom.config import show_bytes
from greenroom.errors import NotAModel
from greenroom.hf.checkpoint.gguf_file import PART
from greenroom.hf.checkpoint.names import HubName

DEFAULT = "Q4_K_M"  # taken if a name has no quantisation; llama.cpp has the same default
# Config, tokenizer, template. With README.md every repository has a small file, with which
# huggingface_hub stores the listing of all files (hub/cached.py reads it).
TEXTS = ["*.json", "*.model", "*.txt", "*.jinja", "LICENSE*", "README.md"]
WEIGHTS = ["*.safetensors", "*.greenroom", "dense.gguf"]
OTHER_FORMATS = "consolidated*"  # copies of the weights; others are in folders
_LABEL = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP\d\w*|NVFP\d\w*|BF16|FP?16|FP?32|FP8\w*))"
    r"(?=$|[-./])",
    re.IGNORECASE,
)
_NO_MODEL = re.compile(r"mmproj|imatrix|ggml-vocab", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """One quantisation of a GGUF repository: its label, and its files in the order of parts.

    parts: the number of files that the names of the files promise
    """

    label: str
    files: tuple[str, ...]
    nbytes: int
    parts: int

    @property
    def complete(self) -> bool:
        return len(self.files) == self.parts

    def matches(self, text: str) -> bool:
        """Check whether a user's text is this quantisation's label, file, or file without .gguf."""
        names = {self.label, _stem(self.files[0]), basename(_stem(self.files[0]))}
        for file in self.files:
            names |= {file, basename(file), splitext(basename(file))[0]}
        return text.casefold() in {name.casefold() for name in names}


@dataclass(frozen=True, slots=True)
class Selection:
    """The files of a repository that a model needs.

    texts:        config, tokenizer and similar small files
    weights:      safetensors files, a pack's files, or the parts of one quantisation
    quantisation: the quantisation, if the weights are GGUF files
    """

    texts: tuple[str, ...]
    weights: tuple[str, ...]
    quantisation: Quantisation | None = None

    @property
    def is_pack(self) -> bool:
        return any(path.endswith(".greenroom") for path in self.weights)

    @property
    def entry(self) -> str:
        """Return the path, below the repository's folder, by which the model is opened."""
        return self.quantisation.files[0] if self.quantisation else ""


def quantisations(sizes: Mapping[str, int]) -> list[Quantisation]:
    """Find the quantisations in a repository's files, smallest first.

    `sizes` maps paths to bytes. Projectors (mmproj) and importance matrices are left out.
    """
    groups: dict[str, list[str]] = {}
    for path in sorted(sizes):
        if path.endswith(".gguf") and not _NO_MODEL.search(path):
            groups.setdefault(_stem(path), []).append(path)
    labels = [_label(stem) for stem in groups]
    results = []
    for (stem, files), label in zip(groups.items(), labels, strict=True):
        part = PART.match(files[0])
        parts = int(part["count"]) if part else 1
        unique = label is not None and labels.count(label) == 1
        total = sum(sizes[file] for file in files)
        results.append(
            Quantisation(label if label and unique else stem, tuple(files), total, parts)
        )
    return sorted(results, key=lambda each: (each.nbytes, each.label))


def select(model: str, name: HubName, sizes: Mapping[str, int]) -> Selection:
    """Select the files of a repository that a model's name stands for.

    Without a quantisation, safetensors files and packs come first, then the only quantisation, then
    Q4_K_M. Raises NotAModel, with the sizes of all quantisations, if none of them is meant.
    """
    top = [path for path in sizes if "/" not in path and not fnmatch(path, OTHER_FORMATS)]
    texts = tuple(path for path in top if any(fnmatch(path, each) for each in TEXTS))
    weights = tuple(path for path in top if any(fnmatch(path, each) for each in WEIGHTS))
    if name.quantisation is None and any(not path.endswith(".gguf") for path in weights):
        return Selection(texts, weights)
    choices = quantisations(sizes)
    if not choices:
        if name.quantisation is not None:
            raise NotAModel(
                f"{model}: this repository has no GGUF files, so it has no quantisation"
                f" {name.quantisation}: give {name.repository}"
            )
        return Selection(texts, weights)
    chosen = choose(choices, name.quantisation)
    if chosen is None:
        what = (
            f"this repository has no quantisation {name.quantisation}"
            if name.quantisation
            else f"give one of this repository's quantisations, such as {name.repository}:"
            f"{choices[0].label}"
        )
        raise NotAModel(f"{model}: {what}; it has {format_sizes(choices)}")
    if not chosen.complete:
        raise NotAModel(
            f"{model}: {chosen.label} lacks files: {len(chosen.files)} of {chosen.parts} parts are"
            f" there; others: {format_sizes([each for each in choices if each.complete]) or 'none'}"
        )
    return Selection(
        tuple(text for text in texts if not text.endswith(".index.json")), chosen.files, chosen
    )


def format_sizes(choices: list[Quantisation]) -> str:
    """Format quantisations with their sizes, in one line."""
    return ", ".join(f"{each.label} ({show_bytes(each.nbytes)})" for each in choices)


def choose(choices: list[Quantisation], text: str | None) -> Quantisation | None:
    """Return the quantisation that a text means; without a text, the only or the default one."""
    if text is None and len(choices) == 1:
        return choices[0]
    for label in (text or DEFAULT, f"UD-{text or DEFAULT}"):
        matches = [each for each in choices if each.matches(label)]
        if len(matches) == 1:
            return matches[0]
    return None


def _stem(path: str) -> str:
    """Return a GGUF file's path without the number of its part and without .gguf."""
    part = PART.match(path)
    return part["stem"] if part else path.removesuffix(".gguf")


def _label(stem: str) -> str | None:
    labels = _LABEL.findall(stem)
    return labels[-1].upper() if labels else None
