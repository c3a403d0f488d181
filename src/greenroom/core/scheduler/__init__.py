"""The event machine: what it is told, what it decides, and the step under way."""
