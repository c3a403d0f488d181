"""Profiles of machines and estimates of models for the commands plan, tune and doctor."""
