"""What the engine needs of a model: the protocol, llama.cpp, and the scripted fake."""
