"""`--dry-run`: what a run would need, counted on fake tensors."""
