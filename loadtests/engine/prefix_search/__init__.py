"""The cost of finding prefixes for the decoder thread."""
