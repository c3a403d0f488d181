"""Loading of a model (`greenroom.load`): five stages, and the start-up line."""
