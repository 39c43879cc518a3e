"""Who gets a slot, who waits, and for how long: all of the policy is here."""
