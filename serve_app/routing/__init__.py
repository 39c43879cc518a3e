"""Routing: the engine replica for each request, and the number of replicas for a load."""
