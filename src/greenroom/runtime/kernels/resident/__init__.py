"""The path of models of which every expert has a slot: many layers in one parallel region."""
