"""SNIP: statistics -> divergences -> ILP -> plan.  Empty: the solver's process imports no torch."""
