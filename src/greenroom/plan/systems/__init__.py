"""Systems of published papers: a table of their parts, and their simulation."""
