"""Models of transformers whose experts Greenroom serves."""

from greenroom.hf.versions import check_transformers

check_transformers()
