"""`deploy/ray.py`, in which the model of one replica fails as soon as a file is there.

python -m tests.deploy.ray.failing FILE MODEL [options of deploy/ray.py]
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from greenroom.server.engine.loop import ContinuousEngine
from greenroom.server.replicas import hosted

PROGRAM = Path(__file__).parents[3] / "deploy" / "ray.py"
FLAG = sys.argv.pop(1)


class FailingServer(hosted.HostedServer):
    """A server whose engine fails in an answer if it is the first to take the file away."""

    def __init__(self, *args: Any) -> None:
        flag, run_round = FLAG, ContinuousEngine._round

        def fail(engine: ContinuousEngine) -> Any:
            if engine._running:
                try:
                    os.remove(flag)
                except FileNotFoundError:
                    pass
                else:
                    raise RuntimeError("the engine has a bug")
            return run_round(engine)

        ContinuousEngine._round = fail  # type: ignore[method-assign]
        super().__init__(*args)


if __name__ == "__main__":
    hosted.HostedServer = FailingServer  # type: ignore[misc]
    sys.argv[0] = str(PROGRAM)
    runpy.run_path(str(PROGRAM), run_name="__main__")
