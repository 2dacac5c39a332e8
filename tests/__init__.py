"""A package, so that another ``tests`` that is installed does not stand in its way."""
