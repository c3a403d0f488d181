"""What runs and measurements leave to later ones: the files, and the values that they hold."""
