"""The HTML report that `greenroom simulate` writes."""
