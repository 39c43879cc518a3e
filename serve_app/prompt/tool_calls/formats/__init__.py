"""The formats of tool calls."""
