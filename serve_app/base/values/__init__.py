"""The values that cross the handle between ingress and engine."""
