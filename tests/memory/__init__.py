"""Servers of miniatures of published models, in memory cgroups of their `--memory`."""
