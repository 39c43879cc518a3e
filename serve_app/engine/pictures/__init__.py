"""Pictures in prompts: what they are as tokens, and when they are encoded."""
