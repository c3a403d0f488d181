"""Named systems: a table of the systems in papers, and their simulation."""
