"""Configuration of the core: `SchedulerConfig`, shared by runs, the simulator and the planner."""
