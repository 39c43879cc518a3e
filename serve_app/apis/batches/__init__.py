"""OpenAI's files and batches: many requests in a file, answered when nobody else needs the machine."""
