"""Downloads of models from the Hugging Face hub."""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import (
    constants,
    get_safetensors_metadata,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub import errors as hub
from huggingface_hub.utils import get_session
from tqdm import tqdm

from greenroom.errors import ModelError, NotAModel, OutputError, UnsupportedModel
from greenroom.hf.checkpoint.checkpoint import Checkpoint, read_config
from greenroom.hf.checkpoint.header import StoredTensor, tensor_of
from greenroom.hf.checkpoint.names import suggestion

FILES = [
    "*.json",
    "*.safetensors",
    "*.greenroom",
    "dense.gguf",
    "*.model",
    "*.txt",
    "*.jinja",
    "LICENSE*",
]
CONFIG_FILES = ["*config.json", "tokenizer*", "*.model", "vocab.*", "merges.txt", "*.jinja"]
ANSWER_S = 4.0  # seconds to wait for the hub's answer
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS}  # errors of the local disk
NOT_FILES = ["*/*", "consolidated*"]  # copies in other formats: original/, metal/, onnx/ ...


def download(model: str) -> Path:
    """Download a model from the Hugging Face hub; return the local snapshot folder.

    Only the config, tokenizer and safetensors files (or a pack's files) are downloaded, and only
    those that the local cache lacks. If the hub does not answer, the cached files are used. Raises
    NotAModel if the hub has no such model, refuses access or cannot be reached, OutputError if the
    local disk is full or cannot be written.
    """
    with hub_errors(model):
        folder = snapshot_download(
            model, allow_patterns=FILES, ignore_patterns=NOT_FILES, tqdm_class=DownloadBar,
            local_files_only=not reachable(),
        )  # fmt: skip
        read_config(Path(folder))
        return Path(folder)


def download_small(model: str) -> Path:
    """Download a model's config and tokenizer from the hub; return the local snapshot folder.

    No weights are downloaded. If the hub does not answer, the cached files are used. Raises
    NotAModel or OutputError like `download`.
    """
    with hub_errors(model):
        return Path(snapshot_download(
            model, allow_patterns=CONFIG_FILES, ignore_patterns=NOT_FILES,
            local_files_only=not reachable(),
        ))  # fmt: skip


class DownloadBar(tqdm):
    """Progress bar for huggingface_hub that calls a function instead of drawing.

    The class attribute `report` is called with (bytes done, bytes in total) of a file.
    """

    report: Callable[[float, float], object] = staticmethod(lambda done, of: None)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})

    def display(self, *args: Any, **options: Any) -> bool:
        if self.unit == "B" and self.total and self.n and "Downloading" not in self.desc:
            DownloadBar.report(self.n, self.total)
        return True


def reachable() -> bool:
    """True if the Hugging Face hub answers one request within 4 seconds.

    False at once if HF_HUB_OFFLINE is set. The hub's own library would retry six times, with
    pauses.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[Any] = []

    def ask() -> None:
        with suppress(Exception):  # whatever the transport raises
            answers.append(get_session().head(constants.ENDPOINT, timeout=ANSWER_S))

    asking = threading.Thread(target=ask, name="hub", daemon=True)  # names may resolve for minutes
    asking.start()
    asking.join(ANSWER_S)
    return bool(answers)


def cached_snapshot(model: str) -> Path | None:
    """Return the folder of a hub id's snapshot in the local cache, without network.

    The snapshot may be incomplete; None if it has no config.json.
    """
    with hub_errors(model):
        path = try_to_load_from_cache(model, "config.json")
    return Path(path).parent if isinstance(path, str) else None


def read_remote(model: str) -> Checkpoint:
    """Open a model on the Hugging Face hub as a checkpoint, without downloading weights.

    config.json is downloaded; the safetensors headers are read by one or two range requests for
    each file. The weights of this checkpoint cannot be read. Raises NotAModel if the hub cannot be
    reached or has no such model, UnsupportedModel if the model has no safetensors files,
    CheckpointError if a header is invalid.
    """
    with hub_errors(model):
        if not reachable():
            raise _unreachable(model)
        folder = Path(hf_hub_download(model, "config.json")).parent
        config = read_config(folder)
        try:
            metadata = get_safetensors_metadata(model)
        except hub.NotASafetensorsRepoError as error:
            raise UnsupportedModel(
                f"{model}: this model has no safetensors files on the hub, and Greenroom needs them"
            ) from error
    names = sorted(metadata.files_metadata)
    tensors: dict[str, StoredTensor] = {}
    for number, name in enumerate(names):
        for key, info in metadata.files_metadata[name].tensors.items():
            if metadata.weight_map.get(key, name) == name:
                tensors[key] = tensor_of(folder / name, number, key, vars(info), 0)
    return Checkpoint.of(folder, config, names, tensors)


@contextmanager
def hub_errors(model: str) -> Iterator[None]:
    """Context manager that turns hub and network errors into Greenroom's one-line errors."""
    try:
        yield
    except ModelError:
        raise
    except hub.HFValidationError as error:
        raise NotAModel(
            f"{model}: this name is neither a folder nor a hub id such as owner/name"
        ) from error
    except hub.GatedRepoError as error:
        raise NotAModel(
            f"{model}: this model is gated: accept its terms at {constants.ENDPOINT}/{model} and"
            " run `hf auth login`"
        ) from error
    except (hub.RepositoryNotFoundError, hub.RevisionNotFoundError) as error:
        raise NotAModel(
            f"{model}: there is no such folder, and no such model on the hub (for a private model,"
            " run `hf auth login` first)"
        ) from error
    except OSError as error:
        if error.errno in UNWRITABLE:
            where = error.filename or constants.HF_HUB_CACHE
            raise OutputError(f"{model}: cannot write to {where}: {error.strerror}") from error
        raise _unreachable(model) from error
    except Exception as error:  # whatever the transport raises: the user needs one line
        raise _unreachable(model) from error


def _unreachable(model: str) -> NotAModel:
    if constants.HF_HUB_OFFLINE:
        return NotAModel(
            f"{model}: the model is not (completely) in the local cache, and HF_HUB_OFFLINE forbids"
            " a download"
        )
    return NotAModel(
        f"{model}: there is no such folder, the model is not (completely) in the local cache, and"
        f" the hub ({constants.ENDPOINT}) could not be reached{suggestion(model)}"
    )
