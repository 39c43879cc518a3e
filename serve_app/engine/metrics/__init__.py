"""What an engine tells about itself and its requests."""
