"""Recording of the experts that a model's routers choose, and training of predictors."""
