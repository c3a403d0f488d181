"""Damaged and hostile files: a kept corpus, and mutations of valid files."""
