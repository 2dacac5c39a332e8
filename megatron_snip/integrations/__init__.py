"""SNIP inside other trainers' loops, by their own hooks."""
