"""Configuration of the expert scheduler, shared by runs, the simulator and the planner."""
