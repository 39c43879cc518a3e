"""From the configuration to a Serve application: what is decided before anything starts."""
