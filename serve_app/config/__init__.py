"""The configuration: its fields, and what is decided where one is left open."""
