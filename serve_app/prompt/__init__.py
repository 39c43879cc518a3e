"""From what a client says to the tokens that the model reads."""
