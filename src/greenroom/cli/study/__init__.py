"""The report of `greenroom simulate`."""
