"""The ceiling of draft models: what one that always agrees gains."""
