"""Break a run again and again, and check that nothing is lost: `python -m tests.soak.run`."""
