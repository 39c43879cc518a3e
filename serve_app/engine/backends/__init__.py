"""The backend protocol, which is what the engine needs of a model, and llama.cpp behind it."""
