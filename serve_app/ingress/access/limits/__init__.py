"""Limits of the requests that one ingress replica accepts at once."""
