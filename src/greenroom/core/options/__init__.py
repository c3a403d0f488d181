"""Scheduler options that change how missing experts are computed: settings and rules."""
