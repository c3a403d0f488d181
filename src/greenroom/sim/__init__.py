"""Simulator of MoE inference with an expert cache, on recorded traces of routing."""
