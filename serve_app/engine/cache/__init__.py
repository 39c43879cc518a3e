"""Slots, and the prefixes that they, memory, disk and other replicas hold."""
