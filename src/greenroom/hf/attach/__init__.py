"""A cache of experts in a transformers model: put in, listened to, taken out again."""
