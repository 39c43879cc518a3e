"""llama-server's own routes."""
