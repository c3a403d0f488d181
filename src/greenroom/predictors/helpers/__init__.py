"""What several predictors are made of: kinds, saved state, places, what compiles them."""
