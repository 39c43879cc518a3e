"""The policy: who gets a slot, who waits, and for how long."""
