"""Terminal output of commands, and the files that they write."""
