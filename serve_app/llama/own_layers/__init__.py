"""A model's own prediction layers (MTP, "next n"): they guess further tokens by its hidden states."""
