"""Tokens that leave the middle of a slot, so that those behind move up."""
