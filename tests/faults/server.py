"""A server whose operations on files fail as another process tells it to.

    python -m tests.faults.server FOLDER serve MODEL [options]     # started by tests/faults/soak.py

It has the layer of shim.cpp. Each line of standard input names a fault below the folder, as
`EIO 17`: the 17th operation from now on that can fail so fails. Standard output then has what
failed since the last line, or `none`.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from greenroom.cli import main
from tests import conftest  # noqa: F401  the settings of all tests
from tests.faults.shim import KINDS, armed


def obey(folder: Path, ready: threading.Event) -> None:
    """Let operations fail until standard input ends; files that are opened before count too."""
    kind, number = KINDS["EIO"], 0
    while True:
        with armed(kind, number, folder) as fault:
            ready.set()
            line = sys.stdin.readline()
        if not line:
            return
        print(fault.operation or "none", flush=True)
        name, _, count = line.partition(" ")
        kind, number = KINDS[name], int(count)


if __name__ == "__main__":
    ready = threading.Event()
    threading.Thread(target=obey, args=(Path(sys.argv[1]), ready), daemon=True).start()
    ready.wait()
    sys.exit(main(sys.argv[2:]))
