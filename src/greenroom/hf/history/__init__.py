"""State between runs of a model: warm start, and counts for `--split auto`."""
