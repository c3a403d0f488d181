"""Machines and models as plan, tune and doctor estimate them."""
