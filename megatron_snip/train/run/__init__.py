"""The run folder: what a run writes and what it reads again."""
