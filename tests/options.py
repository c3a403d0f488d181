"""A pytest mark that skips tests of a scheduler option whose file was deleted."""

from __future__ import annotations

import pytest

from greenroom.core.config.scheduler import option_names


def needs_option(name: str) -> pytest.MarkDecorator:
    """Skip where the scheduler has no such option."""
    return pytest.mark.skipif(name not in option_names(), reason=f"there is no option {name}")
