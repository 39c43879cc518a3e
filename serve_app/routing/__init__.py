"""Which engine replica gets a request, and how many replicas a load needs."""
