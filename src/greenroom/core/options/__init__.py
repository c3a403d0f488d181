"""Options that change the scheduler's plans: settings, one option a file, and their `rules`."""
