"""From statistics to divergences, and from those to the quality loss that a plan minimises; numpy alone."""
