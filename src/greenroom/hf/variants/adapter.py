"""Read an adapter: a folder with tensors that replace those of some of a model's experts.

Expert-Specialized Fine-Tuning (ESFT, arXiv 2407.01906) trains a few experts of each layer. Its
adapters are safetensors files with the tensors of these experts, named as in the model's checkpoint
or without the leading `model.`, and `expert_cfg.json`, which lists the experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from greenroom.errors import CheckpointError, UnsupportedModel, UsageError
from greenroom.hf.checkpoint.checkpoint import INDEX, PICKLES, Checkpoint, weight_files
from greenroom.hf.checkpoint.header import LONGEST, StoredTensor, read_header
from greenroom.hf.checkpoint.quantised.methods import combine_codes_and_scales
from greenroom.json_file import Malformed, printable, read_object

LISTED = "expert_cfg.json"
PREFIX = "model."  # that names of tensors may lack
NUMBERS = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?experts\.(\d+)\.")  # of layer and expert


def with_adapter(checkpoint: Checkpoint, folder: Path, experts: Iterable[str]) -> Checkpoint:
    """Return a checkpoint in which an adapter's tensors replace those of the same names.

    experts: names of the checkpoint's tensors that belong to routed experts

    Only headers are read. The checkpoint's files come first, then the adapter's. Raises UsageError
    for a folder without an adapter, UnsupportedModel for a checkpoint that is no folder of
    safetensors files or an adapter that changes other weights than experts, CheckpointError for a
    damaged adapter or one whose tensors do not fit the model.
    """
    if checkpoint.pack is not None or not checkpoint.files[0].endswith(".safetensors"):
        raise UnsupportedModel(
            f"{folder}: an adapter needs the original checkpoint, a folder of safetensors files,"
            f" but {checkpoint.folder} is a {'pack' if checkpoint.pack is not None else 'GGUF'}"
            " model"
        )
    files, changed = _read(folder, len(checkpoint.files))
    names = {name: _name_in(checkpoint, name) for name in changed}
    _check_fit(checkpoint, files, {names[name]: each for name, each in changed.items()}, experts)
    _check_listed(folder, names.values())
    stored = {**checkpoint.stored, **{names[name]: each for name, each in changed.items()}}
    return replace(
        checkpoint,
        files=(*checkpoint.files, *files),
        tensors=combine_codes_and_scales(checkpoint.config, stored, checkpoint.folder),
        stored=stored,
    )


def _read(folder: Path, first: int) -> tuple[list[str], dict[str, StoredTensor]]:
    """Return an adapter's files, and the tensors in them by name.

    `first` is the number of the adapter's first file among those of the model.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder with an adapter")
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        names = weight_files(folder)[0]  # or CheckpointError, if one of them is missing
    if not names:
        pickle = next((p for pattern in PICKLES for p in sorted(folder.glob(pattern))), None)
        reason = f" ({pickle.name} is a pickle file: convert it)" if pickle is not None else ""
        raise UsageError(
            f"{folder}: an adapter needs safetensors files, but the folder has none{reason}"
        )
    files, tensors = [str(folder.absolute() / name) for name in names], dict[str, StoredTensor]()
    for number, path in enumerate(files, first):
        for name, tensor in read_header(Path(path), number).items():
            if name in tensors:
                raise CheckpointError(f"{path}: the tensor {name} is in another file, too")
            tensors[name] = tensor
    if not tensors:
        raise UsageError(f"{folder}: the adapter's files have no tensors")
    return files, tensors


def _name_in(checkpoint: Checkpoint, name: str) -> str:
    """Return the name that an adapter's tensor has in the checkpoint, or would have."""
    stored = checkpoint.stored
    return PREFIX + name if name not in stored and PREFIX + name in stored else name


def _check_fit(
    checkpoint: Checkpoint,
    files: list[str],
    changed: Mapping[str, StoredTensor],
    experts: Iterable[str],
) -> None:
    """Check that the tensors are those of experts, in the checkpoint's shapes and types."""
    places = {
        (part.file, part.offset) for name in experts for part in checkpoint.tensors[name].parts
    }
    for name, tensor in changed.items():
        path, expected = files[tensor.file - len(checkpoint.files)], checkpoint.stored.get(name)
        if expected is None:
            raise CheckpointError(
                f"{path}: the model {checkpoint.folder} has no tensor {name}: the adapter is of"
                " another model, or of a form that is not supported"
            )
        if (expected.file, expected.offset) not in places:
            raise UnsupportedModel(
                f"{path}: the tensor {name} belongs to no routed expert: an adapter may change"
                " experts alone, not routers, attention, norms, shared experts or embeddings"
            )
        for what, ours, theirs in (
            ("shape", list(tensor.shape), list(expected.shape)),
            ("dtype", tensor.dtype, expected.dtype),
        ):
            if ours != theirs:
                raise CheckpointError(
                    f"{path}: the tensor {name} has {what} {ours}, but in the model {theirs}"
                )


def _check_listed(folder: Path, names: Iterable[str]) -> None:
    """Check that the adapter has all experts that its expert_cfg.json lists, if there is one."""
    if not (folder / LISTED).is_file():
        return
    present = {(match[1], match[2]) for name in names if (match := NUMBERS.search(name))}
    try:
        listed = read_object(folder / LISTED, CheckpointError, LONGEST).object("experts")
        experts = {(layer, str(e)) for layer in listed for e in listed.values[layer]}
    except (Malformed, TypeError) as error:
        raise CheckpointError(
            f"{folder / LISTED}: damaged: experts must be lists of numbers by layer"
        ) from error
    if present and (missing := sorted(experts - present)):
        layer, expert = missing[0]
        raise CheckpointError(
            f"{folder}: {LISTED} lists expert {printable(expert)} of layer {printable(layer)}, but"
            " the adapter has no tensor of it: download the adapter again"
        )
