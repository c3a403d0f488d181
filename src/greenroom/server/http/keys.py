"""The API key, and who may do without one."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from greenroom.errors import UsageError

VARIABLE = "GREENROOM_API_KEY"


def read_api_key(file: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key in the first line of a file, or that of the environment; None where neither is set.

    UsageError where there should be one and is none.
    """
    if file is not None:
        try:
            with Path(file).open(encoding="utf-8") as lines:
                key = lines.readline(4096)
        except OSError as error:
            raise UsageError(f"--api-key-file {file}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"--api-key-file {file}: is not text") from error
        return _checked(key.strip(), f"--api-key-file {file}: its first line")
    if VARIABLE not in environment:
        return None
    return _checked(environment[VARIABLE].strip(), VARIABLE)


def _checked(key: str, where: str) -> str:
    if not key:
        raise UsageError(f"{where} is empty: it must be the API key")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise UsageError(f"{where} is no API key: letters, digits and signs without spaces")
    return key


def check_address(host: str, key: str | None) -> None:
    """UsageError where others could reach a server that asks for no key."""
    if key is None and not is_loopback(host):
        raise UsageError(
            f"--host {host} lets other machines in: give a key by --api-key-file or {VARIABLE}"
        )


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
