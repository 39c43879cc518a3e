"""The engine alone, beside other ways to serve with llama.cpp: no Ray, no HTTP."""
