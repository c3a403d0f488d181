"""Checks of options, and stand-ins for unused modules, before heavy libraries are imported."""
