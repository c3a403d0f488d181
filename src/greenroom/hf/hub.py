"""Download a model from the hub: the one place that talks to the network."""

from __future__ import annotations

import errno
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub import errors as hub

from greenroom.errors import ModelError, NotAModel, OutputError
from greenroom.hf.checkpoint import read_config

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
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS}  # the disk's fault
NOT_FILES = ["*/*", "consolidated*"]  # copies in other formats: original/, metal/, onnx/ ...


def download(model: str) -> Path:
    """The local snapshot of a hub id, downloaded where needed; NotAModel if that fails."""
    try:
        folder = Path(snapshot_download(model, allow_patterns=FILES, ignore_patterns=NOT_FILES))
        read_config(folder)
        return folder
    except ModelError:
        raise
    except hub.HFValidationError as error:
        raise NotAModel(f"{model}: neither a folder nor a hub id such as owner/name") from error
    except hub.GatedRepoError as error:
        raise NotAModel(
            f"{model}: gated on the hub: accept its terms there and run `hf auth login`"
        ) from error
    except (hub.RepositoryNotFoundError, hub.RevisionNotFoundError) as error:
        raise NotAModel(
            f"{model}: no such folder, and no such model on the hub (if private: `hf auth login`)"
        ) from error
    except OSError as error:
        if error.errno in UNWRITABLE:
            where = error.filename or constants.HF_HUB_CACHE
            raise OutputError(f"{model}: cannot write to {where}: {error.strerror}") from error
        raise _unreachable(model, error) from error
    except Exception as error:  # whatever the transport raises: the user needs one line
        raise _unreachable(model, error) from error


def _unreachable(model: str, error: Exception) -> NotAModel:
    if constants.HF_HUB_OFFLINE:
        return NotAModel(f"{model}: not (completely) in the local cache, and HF_HUB_OFFLINE is set")
    return NotAModel(
        f"{model}: no such folder, and the hub could not be reached ({type(error).__name__})"
    )
