"""Other programs that batch, beside the engine."""
