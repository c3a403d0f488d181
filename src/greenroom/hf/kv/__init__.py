"""KV caches: layers that grow in place, kinds, memory sizes, and batched forward passes."""
