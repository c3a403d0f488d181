"""Checks of a streamed model: equality with transformers, quality of inexact settings."""
