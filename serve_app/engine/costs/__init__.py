"""The profile of this model on this machine, and what is chosen by it."""
