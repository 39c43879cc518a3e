"""From tokens to text, and from text to drafts."""
