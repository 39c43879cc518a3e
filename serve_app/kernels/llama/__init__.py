"""llama.cpp through ctypes: the only package that imports `llama_cpp`.

`library` starts and quietens it, `model` opens a GGUF (weights or vocabulary only), `context` decodes
batches, `sampler` builds sampler chains. Nothing in here knows about slots, sequences or Ray.
"""

import os

# llama.cpp's threads wait for each other by spinning, and sleep after so many turns, about half a
# millisecond. By itself, libgomp spins for ten times as long. Meanwhile a thread that another program has
# displaced cannot have that core. The variable is read when libgomp is loaded, and `library` takes it away
# then. Programs that this one starts, as other servers to compare with, are as their users have them.
IS_SPIN_COUNT_OWN = os.environ.keys().isdisjoint(("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
if IS_SPIN_COUNT_OWN:
    os.environ["GOMP_SPINCOUNT"] = "30000"
