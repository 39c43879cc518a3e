"""The HTTP door: OpenAI's API in front of the engines."""
