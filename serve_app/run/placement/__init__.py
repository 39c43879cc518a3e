"""The resources of the machine that this process may use."""
