"""The rewarder: scores the groups of a run and filters those without signal."""
