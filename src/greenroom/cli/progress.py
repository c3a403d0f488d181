"""Progress bars: a terminal gets them, a file or a program that reads `--json` does not."""

from __future__ import annotations

import sys


def bars(loading: bool, wanted: bool = True) -> None:
    """The hub's bars where standard error is a terminal; transformers' too if `loading`."""
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    shown = wanted and sys.stderr.isatty()
    if shown and loading:
        logging.enable_progress_bar()
    else:
        logging.disable_progress_bar()
    if shown:
        enable_progress_bars()
    else:
        disable_progress_bars()
