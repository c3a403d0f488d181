"""Proof that a streamed model computes the same, and what inexact settings cost."""
