"""KV transfers: what engines know and have of each other's prefixes."""
