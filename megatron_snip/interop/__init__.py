"""Moving weights and plans to and from other frameworks."""
