"""Recording of which experts a model's routers choose, and training of predictors."""
