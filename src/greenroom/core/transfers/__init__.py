"""What the links carry: the queue of transfers, and the tier of host memory between two links."""
