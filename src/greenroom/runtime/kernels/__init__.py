"""Kernels that compute experts from their memory slots, and compiled dense layers for one token."""
