"""The expert cache of a transformers model: attach it, observe passes, detach it."""
