"""Pictures: libmtmd makes embeddings of them."""
