"""Tool calls in what a model says: one file for each format that chat templates ask for."""

from serve_app.prompt.tool_calls.calls import CallParser, ToolCall
from serve_app.prompt.tool_calls.formats import ToolFormat, detect
from serve_app.prompt.tool_calls.hermes import HermesParser

__all__ = ["CallParser", "HermesParser", "ToolCall", "ToolFormat", "detect"]
