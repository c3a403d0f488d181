"""Rules by which options decide; they know no slots and no transfers."""
