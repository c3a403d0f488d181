"""Load a model (`greenroom.load`) in stages: resolve, describe, budget, place, attach, report."""
