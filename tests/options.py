"""Marks for tests that need an option of the scheduler: without its file they skip themselves."""

from __future__ import annotations

import pytest

from greenroom.core.config.scheduler import option_names


def needs_option(name: str) -> pytest.MarkDecorator:
    """Skip where the scheduler has no such option."""
    return pytest.mark.skipif(name not in option_names(), reason=f"there is no option {name}")
