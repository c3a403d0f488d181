"""Blocks of decoder layers after attention: MLPs, and MoE blocks with their routers."""
