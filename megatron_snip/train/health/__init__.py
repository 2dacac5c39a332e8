"""Checks of a run's health: memory, loss spikes, reruns, and the guard that goes back."""
