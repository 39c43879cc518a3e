"""The decisions that make a Serve application of a configuration, before anything starts."""
