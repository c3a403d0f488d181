"""Models of transformers whose experts Greenroom serves.

In the order of their imports: adapters, checkpoint, index, model, kv, memory, attach, load; text;
check and pack are above them.
"""

from greenroom.hf.versions import check_transformers

check_transformers()
