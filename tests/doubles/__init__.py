"""Doubles of what needs a model: scripted backends and drafts."""
