"""History of runs and measurements: the files, and the values in them."""
