"""The way of model files from their origin onto this node: names, downloads, a bounded folder."""
