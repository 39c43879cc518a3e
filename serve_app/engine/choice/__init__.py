"""What a start decides for a model, by measurement: its plan."""
