"""How a step's experts are computed from their slots, and faster dense layers for one token."""
