"""Models of transformers whose experts Greenroom streams from disk.

The subpackages, in the order of their imports: adapters, checkpoint, index, model, kv, memory,
attach, load, text; check and pack import all of these. Importing this package checks the version of
transformers.
"""

from greenroom.hf.versions import check_transformers

check_transformers()
