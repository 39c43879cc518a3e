"""The work around a decode: drafts before it; sampled tokens and their text after it."""
