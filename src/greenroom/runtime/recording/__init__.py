"""Recording the routing of a run, and training a predictor from recordings."""
