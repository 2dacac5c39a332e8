"""What a run does when something goes wrong: how starts, hangs, ends and failed writes are told apart and told."""
