"""Prefetching of predicted experts, and a guard that stops it when it slows decoding."""
