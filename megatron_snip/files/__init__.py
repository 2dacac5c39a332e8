"""The user's files: reading with limits, atomic writing, JSON with a schema."""
