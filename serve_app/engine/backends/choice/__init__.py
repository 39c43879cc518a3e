"""Which backend computes a model: as configured, or as measured."""
