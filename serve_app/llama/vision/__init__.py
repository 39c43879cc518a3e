"""What sees: libmtmd, which makes embeddings of pictures."""
