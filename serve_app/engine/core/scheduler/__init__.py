"""The scheduler: which rows a step computes, and which request gets the next slot."""
