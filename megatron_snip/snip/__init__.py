"""SNIP: statistics -> divergences -> ILP -> plan.  Imports nothing: the solver's process must not load torch."""
