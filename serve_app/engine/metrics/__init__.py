"""An engine's statistics, and the records of its requests."""
