"""Launch one kernel entry, or several in one OpenMP parallel region."""
