"""Settings of one loaded model measured in turns, its routing recorded, a dry run of a machine."""
