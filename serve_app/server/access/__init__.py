"""Access: who may ask, from where, and how much at once. The middleware before all routes is here."""
