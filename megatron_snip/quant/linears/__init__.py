"""A group of linears that read one input: its three GEMMs, and the backends that run them."""
