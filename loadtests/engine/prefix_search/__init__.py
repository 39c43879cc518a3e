"""What finding prefixes costs the decoder thread."""
