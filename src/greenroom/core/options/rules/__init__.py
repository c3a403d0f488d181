"""Rules by which options decide, each without knowledge of slots and transfers."""
