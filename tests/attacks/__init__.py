"""Attacks on a real server: it answers, refuses in one line, and goes on."""
