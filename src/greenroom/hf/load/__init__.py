"""`greenroom.load` in stages: resolve, describe, budget, place, attach; start-up line."""
