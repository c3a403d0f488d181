"""Published systems for MoE inference: a table of their parts, and their simulation."""
