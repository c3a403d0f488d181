"""The demo by the command line, on CPU and GPU, with eager and default kernels."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from ledger import Ledger

PROMPT, TOKENS = "Once upon a time", 48


class Cells:
    """The part "demo"; a cell is a device and a name of kernels."""

    def __init__(self, args: argparse.Namespace, ledger: Ledger) -> None:
        self._args = args

    def measure(self, cell: str) -> dict[str, Any]:
        """The text of a run, and its seconds from start to end."""
        device, kernels = cell.split()
        tokens = 4 if self._args.smoke else TOKENS
        command = [
            sys.executable, "-m", "greenroom", "run", "demo", PROMPT, "--raw", "--json",
            "--device", device, "--kernels", kernels, "--cache", "25%", "--temperature", "0",
            "--max-new-tokens", str(tokens),
        ]  # fmt: skip
        begin = time.perf_counter()
        left = max(1.0, self._args.until - time.time())
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr else "no output")
        report = json.loads(done.stdout.strip().splitlines()[-1])
        return {"seconds": seconds, "text": report["text"]}
