"""Defects that a suite of tests must find, as patches against the sources.

fuzz/       one for each parser: `python -m tests.mutants [NAMES]`
faults/     in store, driver and server: `python -m tests.faults.mutants`
schedules/  of threads: `python -m tests.schedules.mutants`
patches.py  applies a patch to a copy of the package
"""
