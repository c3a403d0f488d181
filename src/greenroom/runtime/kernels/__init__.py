"""Kernels that compute MoE experts from memory slots, and compiled dense layers for one token."""
