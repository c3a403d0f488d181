"""Defects, one for each parser, that its fuzzer must find: `python -m tests.mutants [NAMES]`.

NAME.patch     the defect, against the sources of Greenroom
__main__.py    runs the fuzzer of each format on a patched copy of the package
patches.py     applies a patch to a copy
"""
