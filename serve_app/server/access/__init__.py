"""Who may ask, from where, and how much at once: the middleware before all routes."""
