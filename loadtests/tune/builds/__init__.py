"""Which build of llama.cpp is fastest on a machine."""
