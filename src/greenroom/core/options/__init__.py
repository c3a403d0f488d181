"""Options that change how the scheduler has experts computed: their settings and rules."""
