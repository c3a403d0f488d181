"""KV caches that grow in place, their kinds and sizes, and batched passes over several."""
