"""OpenAI's transcriptions and translations of speech, by models that hear."""
