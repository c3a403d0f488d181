"""Batch files in OpenAI's format: requests that are answered without a server."""
