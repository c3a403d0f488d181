"""Models of transformers whose experts Greenroom streams from disk.

A subpackage imports only subpackages before it in this order: checkpoint, mtp, adapters, index,
model, kv, memory, history, attach, load, text, measure, check, pack. Importing greenroom.hf checks
the version of transformers.
"""

from greenroom.hf.versions import check_transformers

check_transformers()
