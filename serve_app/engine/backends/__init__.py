"""The backend protocol, which is what the engine needs of a model; llama.cpp; and the scripted fake."""
