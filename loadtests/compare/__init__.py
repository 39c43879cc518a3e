"""Corral and its peers over HTTP, side by side."""
