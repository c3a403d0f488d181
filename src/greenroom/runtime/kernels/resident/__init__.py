"""Decode with all experts in memory: many layers in one OpenMP parallel region."""
