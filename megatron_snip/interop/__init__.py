"""Weights and plans to and from other frameworks."""
