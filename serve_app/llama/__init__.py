"""llama.cpp through ctypes: the only package that imports `llama_cpp`.

`library` starts and quietens it, `model` opens a GGUF (weights or vocabulary only), `context` decodes
batches, `sampler` builds sampler chains. Nothing in here knows about slots, sequences or Ray.
"""
