"""Named systems: the table of what papers describe, and its rows as cells of a simulation."""
