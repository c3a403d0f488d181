"""How compiled entries are started: one alone, or several in one parallel region."""
