"""Where model files come from, and how they get onto this node: names, downloads, a bounded folder."""
