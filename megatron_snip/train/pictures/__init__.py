"""Pictures of plans, losses and trials, for the report, the trackers and the commands."""
