"""Kernels: experts computed from their slots, and compiled dense layers for one token."""
