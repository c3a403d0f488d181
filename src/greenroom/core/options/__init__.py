"""Options of the scheduler that change its plans: one a file; `rules` holds what they decide by."""
