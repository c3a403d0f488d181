"""What every API needs of HTTP: bodies, errors, streams, the log, metrics."""
