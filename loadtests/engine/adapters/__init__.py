"""What it costs that requests of one engine have different adapters."""
