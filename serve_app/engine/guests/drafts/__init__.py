"""Draft models: a small model proposes the tokens that a sequence may go on with."""
