"""Compiled dense layers for the one token of a decode step."""
