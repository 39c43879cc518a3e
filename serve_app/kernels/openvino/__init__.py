"""OpenVINO's kernels: a GGUF file converted to OpenVINO's format, and a context with paged attention."""
