"""What each step computes, and who is next for a slot."""
