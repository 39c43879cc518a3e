"""Work that shares the steps with the sequences: drafts, texts, pictures, changes of the cache."""
