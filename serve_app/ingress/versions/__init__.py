"""Several versions of a model under one name: which one answers, and who changes that."""
