"""Mutate valid files of every format for a time, and keep each input that is read wrongly.

    python -m tests.fuzz                                    # all formats, 60 seconds together
    GREENROOM_FUZZ_SECONDS=600 python -m tests.fuzz gguf    # some of them
    GREENROOM_FUZZ_INPUTS=1000000 python -m tests.fuzz      # so many inputs together
    python -m tests.fuzz --table                            # the results of all runs
    python -m tests.fuzz --blind                            # without guidance, to compare with

Another run tries other inputs, unless GREENROOM_FUZZ_SEED is set. Exit code 1 where any input
failed: it lies in tests/data/corpus then, and `make check` fails until it is read well.
"""

from __future__ import annotations

import os
import sys

from tests.fuzz import coverage
from tests.fuzz.kept import Shared, supervise


def main(shared: Shared) -> int:
    os.environ["OMP_NUM_THREADS"] = "1"  # threads that wait would count as reading
    coverage.install()
    from tests.fuzz import run  # imports Greenroom, after the change of how that is done

    names = [name for name in sys.argv[1:] if not name.startswith("--")]
    return (run.table if "--table" in sys.argv else run.run)(names, shared)


if __name__ == "__main__":
    sys.exit(supervise(main))
