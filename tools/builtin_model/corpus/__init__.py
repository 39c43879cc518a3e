"""The text that the built-in model learns from: made here, from tables and templates."""
