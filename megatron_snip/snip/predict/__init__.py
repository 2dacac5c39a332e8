"""From statistics to divergences, and to the quality loss that a plan minimises; only numpy."""
