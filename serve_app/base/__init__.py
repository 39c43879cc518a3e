"""Values and helpers that all rooms share. Nothing here imports another room."""
