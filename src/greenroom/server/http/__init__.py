"""HTTP parts that all APIs share: bodies, errors, streams, the log, metrics."""
