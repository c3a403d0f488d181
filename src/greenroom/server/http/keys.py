"""The API key of the server, and the addresses that need none."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from greenroom.errors import UsageError

VARIABLE = "GREENROOM_API_KEY"


def read_api_key(file: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Read the server's API key from a file's first line, or from the environment.

    Without a `file`, the key is the variable GREENROOM_API_KEY, or None if that is not set.
    UsageError if the file cannot be read, or the key is not valid.
    """
    if file is not None:
        try:
            with Path(file).open(encoding="utf-8") as lines:
                key = lines.readline(4096)
        except OSError as error:
            raise UsageError(f"--api-key-file {file}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"--api-key-file {file}: the file is not UTF-8 text") from error
        return _checked(key.strip(), f"--api-key-file {file}: the first line")
    if VARIABLE not in environment:
        return None
    return _checked(environment[VARIABLE].strip(), VARIABLE)


def _checked(key: str, where: str) -> str:
    if not key:
        raise UsageError(f"{where} is empty: put the API key there")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise UsageError(
            f"{where} is not a valid API key: use ASCII letters, digits and signs, no spaces"
        )
    return key


def check_address(host: str, key: str | None) -> None:
    """Raise UsageError if other machines could reach a server that has no API key."""
    if key is None and not is_loopback(host):
        raise UsageError(
            f"--host {host} lets other machines use the server:"
            f" set an API key by --api-key-file or {VARIABLE}"
        )


def is_loopback(host: str) -> bool:
    """Is a network address reachable from this machine only?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
