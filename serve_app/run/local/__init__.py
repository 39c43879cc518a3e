"""The server of one machine without Ray: a process for the ingress, and one for each model."""
