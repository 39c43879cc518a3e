"""What surrounds a decode: drafts before it; sampled tokens and their text after it."""
