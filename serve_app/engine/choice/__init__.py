"""The decisions of a start for a model, by measurement: its plan."""
