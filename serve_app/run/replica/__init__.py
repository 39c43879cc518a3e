"""An engine replica: the Serve deployment around one engine, and what it exchanges with others."""
