"""The HTML report of a simulation, and recordings of simulations for the map of experts."""
