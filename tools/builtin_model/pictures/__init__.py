"""How the built-in model learned to see: pictures that a script draws, and a projector trained on them."""
