"""Errors of the hub, the network and the local disk, as one-line errors of Greenroom."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants
from huggingface_hub import errors as hub

from greenroom.errors import GreenroomError, NotAModel, OutputError
from greenroom.hf.checkpoint.names import parse_hub_name, suggestion

FULL = {errno.ENOSPC, errno.EDQUOT}
UNWRITABLE = {*FULL, errno.EACCES, errno.EPERM, errno.EROFS}  # errors of the local disk
RESUMED = "the same command goes on from there"


@contextmanager
def hub_errors(model: str) -> Iterator[None]:
    """Context manager that turns hub and network errors into Greenroom's one-line errors."""
    name = parse_hub_name(model)
    repository = name.repository if name else model
    try:
        yield
    except GreenroomError:
        raise
    except hub.HFValidationError as error:
        raise NotAModel(
            f"{model}: this name is neither a folder nor a hub id such as owner/name"
        ) from error
    except hub.GatedRepoError as error:
        raise NotAModel(
            f"{model}: this model is gated: accept its terms at"
            f" {constants.ENDPOINT}/{repository} and run `hf auth login`"
        ) from error
    except hub.RevisionNotFoundError as error:
        revision = name.revision if name else None
        raise NotAModel(
            f"{model}: there is no such model: {repository} has no revision {revision or 'main'}:"
            " give a branch, a tag or a commit after @"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise NotAModel(
            f"{model}: there is no such folder, and no such model on the hub (for a private model,"
            f" run `hf auth login` first){suggestion(repository)}"
        ) from error
    except hub.HfHubHTTPError as error:
        raise _refusal(model, repository, error) from error
    except OSError as error:
        if error.errno in UNWRITABLE:
            where = error.filename or constants.HF_HUB_CACHE
            free = f": free some space; {RESUMED}" if error.errno in FULL else ""
            raise OutputError(
                f"{model}: cannot write to {where}: {error.strerror}{free}"
            ) from error
        raise unreachable(model) from error
    except Exception as error:  # whatever the transport raises: the user needs one line
        raise unreachable(model) from error


def _refusal(model: str, repository: str, error: hub.HfHubHTTPError) -> NotAModel:
    """Return the error for an HTTP status of the hub that has no class of its own."""
    status = getattr(error.response, "status_code", 0)
    if status in (401, 403):
        return NotAModel(
            f"{model}: the hub refuses access ({status}): accept the model's terms at"
            f" {constants.ENDPOINT}/{repository}, and run `hf auth login` with a token that may"
            " read it"
        )
    if status == 404:
        return NotAModel(f"{model}: the hub lacks a file of this model ({status}): try again later")
    return NotAModel(f"{model}: the hub ({constants.ENDPOINT}) answers {status}: try again later")


def unreachable(model: str) -> NotAModel:
    """Return the error for a model that neither the cache nor the hub has now."""
    if constants.HF_HUB_OFFLINE:
        return NotAModel(
            f"{model}: the model is not (completely) in the local cache, and HF_HUB_OFFLINE forbids"
            " a download"
        )
    return NotAModel(
        f"{model}: there is no such folder, the model is not (completely) in the local cache, and"
        f" the hub ({constants.ENDPOINT}) could not be reached{suggestion(model)}"
    )
