"""llama.cpp and OpenVINO: the only importers of their packages."""
