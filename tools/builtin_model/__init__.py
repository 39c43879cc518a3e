"""Training of the built-in model and of its projector: text, pictures, networks, files, scores."""
