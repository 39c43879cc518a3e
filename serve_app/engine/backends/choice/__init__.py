"""The choice of the backend that computes a model, as configured, or as measured."""
