"""Headers of models on the hub, read by range requests without downloading weights."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url
from huggingface_hub.errors import NotASafetensorsRepoError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

from greenroom.config import show_bytes
from greenroom.errors import CheckpointError, GreenroomError, UnsupportedModel, UsageError
from greenroom.hf.checkpoint.checkpoint import Checkpoint, read_config
from greenroom.hf.checkpoint.gguf import GgufCheckpoint
from greenroom.hf.checkpoint.gguf_file import Cursor, DamagedHeader
from greenroom.hf.checkpoint.header import StoredTensor, tensor_of
from greenroom.hf.checkpoint.hub.errors import hub_errors, unreachable
from greenroom.hf.checkpoint.hub.quantisations import Selection, select
from greenroom.hf.checkpoint.hub.repository import HubFile, Repository, ask_hub, hub_name, reachable

HEADER_BYTES = 1 << 20  # of a GGUF file, requested first; doubled until the header is complete
MOST_HEADER_BYTES = 1 << 26  # vocabularies of today's models take up to 20 MB
CUT_OFF = "the file ends"  # in the reader's message if bytes are missing


def read_remote(model: str, config: str | None = None) -> Checkpoint:
    """Open a model on the Hugging Face hub as a checkpoint, without downloading weights.

    config.json is downloaded; the headers of safetensors and GGUF files are read by range requests.
    `config` names the config of a GGUF file, as in `open_checkpoint`. The weights of this
    checkpoint cannot be read. Raises NotAModel if the hub cannot be reached or has no such model,
    UnsupportedModel if the model has neither safetensors nor GGUF files, CheckpointError if a
    header is invalid.
    """
    if not reachable():
        raise unreachable(model)
    with hub_errors(model):
        repository = ask_hub(hub_name(model))
        selection = select(model, repository.name, repository.sizes)
        if selection.quantisation is not None:
            return _read_gguf(repository, selection, config)
        if config is not None:
            raise UsageError(f"--config is for GGUF files, but {model} has a config: leave it out")
        return _read_safetensors(model, repository)


def _read_safetensors(model: str, repository: Repository) -> Checkpoint:
    name, commit = repository.name.repository, repository.commit
    if "config.json" not in repository.files:
        raise UnsupportedModel(f"{model}: this repository has no config.json, so it holds no model")
    folder = Path(hf_hub_download(name, "config.json", revision=commit)).parent
    config = read_config(folder)
    try:
        metadata = HfApi().get_safetensors_metadata(name, revision=commit)
    except NotASafetensorsRepoError as error:
        raise UnsupportedModel(
            f"{model}: this model has no safetensors files on the hub, and no GGUF files, and"
            " Greenroom needs one of them"
        ) from error
    names = sorted(metadata.files_metadata)
    tensors: dict[str, StoredTensor] = {}
    for number, file in enumerate(names):
        for key, info in metadata.files_metadata[file].tensors.items():
            if metadata.weight_map.get(key, file) == file:
                tensors[key] = tensor_of(folder / file, number, key, vars(info), 0)
    return Checkpoint.of(folder, config, names, tensors)


def _read_gguf(repository: Repository, selection: Selection, config: str | None) -> Checkpoint:
    """Open GGUF files of the hub from their headers, in sparse files of the same lengths.

    They lie in a temporary folder like that of the cache, which is deleted when the process ends.
    """
    temporary = Path(tempfile.mkdtemp(prefix="greenroom-headers-"))
    atexit.register(shutil.rmtree, temporary, True)
    folder = temporary / "snapshots" / repository.commit
    folder.mkdir(parents=True)
    for text in selection.texts:
        if text == "config.json":
            path = hf_hub_download(repository.name.repository, text, revision=repository.commit)
            shutil.copy(path, folder / text)
    for part in selection.weights:
        target = folder / part
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_header(repository, repository.files[part], target)
    try:
        return GgufCheckpoint.open(folder / selection.entry, config)
    except GreenroomError as error:
        message = str(error).replace(f"{folder}{os.sep}", f"{repository.name.repository}/")
        raise type(error)(message) from error


def _write_header(repository: Repository, file: HubFile, target: Path) -> None:
    """Write a sparse file of a remote GGUF file's length that has the bytes of its header."""
    size, target_size = 0, min(HEADER_BYTES, file.nbytes)
    while True:
        with open(target, "ab") as stream:
            stream.write(_request(repository, file, size, target_size))
        size = target_size
        if size == file.nbytes or _is_complete(target):
            break
        if size >= MOST_HEADER_BYTES:
            raise CheckpointError(
                f"{repository.name}: {file.path} has a header of more than {show_bytes(size)}: this"
                " is no valid GGUF file"
            )
        target_size = min(2 * size, file.nbytes)
    os.truncate(target, file.nbytes)


def _is_complete(path: Path) -> bool:
    """Check whether a file's first bytes hold a GGUF header; True also if it is damaged."""
    if path.read_bytes()[:4] != b"GGUF":
        return True
    try:
        cursor = Cursor(path)
        for _ in cursor.pairs():
            pass
        for _ in range(cursor.tensors):
            cursor.entry()
    except DamagedHeader as error:
        return CUT_OFF not in str(error)
    return True


def _request(repository: Repository, file: HubFile, begin: int, end: int) -> bytes:
    """Request the bytes [begin, end) of a file on the hub."""
    if begin == end:
        return b""
    url = hf_hub_url(repository.name.repository, file.path, revision=repository.commit)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    response: Any = http_backoff(
        "GET", url, headers={**headers, "Range": f"bytes={begin}-{end - 1}"},
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
    )  # fmt: skip
    hf_raise_for_status(response)
    if len(response.content) != end - begin:
        raise CheckpointError(
            f"{repository.name}: {constants.ENDPOINT} sends {len(response.content)} of the"
            f" {end - begin} requested bytes of {file.path}: try again later"
        )
    return bytes(response.content)
