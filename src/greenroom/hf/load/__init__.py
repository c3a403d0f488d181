"""`greenroom.load` in stages (resolve, describe, budget, place, attach), and the start-up line."""
