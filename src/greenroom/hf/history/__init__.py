"""Keep state between runs of a model: experts for warm start, counts for `--split auto`."""
