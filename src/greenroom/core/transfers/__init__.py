"""Transfers over links: their queue, and the host tier between two links."""
