"""Several servers of one model behind one address: which one answers, and joined responses."""
