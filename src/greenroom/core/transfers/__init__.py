"""Transfers of experts over links: their queue, and the cache in host memory."""
