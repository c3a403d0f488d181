"""Shared HTTP parts of all APIs: bodies, errors, streams, the log, metrics."""
