"""How a model is served fastest on this machine, and what that costs in quality: measured."""
