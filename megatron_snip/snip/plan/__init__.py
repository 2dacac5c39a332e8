"""From quality losses to a plan: options and their savings, the integer program and its process, the plan file.

Imports nothing: the solver's process, which imports ``ilp`` from this package, must not load torch.
"""
