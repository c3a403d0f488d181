"""Chromium for the tests of pages."""

from tests.browser import browser, visit  # noqa: F401
