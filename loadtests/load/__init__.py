"""A server under load: reports, capacity, chaos, scaling."""
