"""OpenVINO's kernels: a GGUF file converted to OpenVINO's format, and a context with paged attention."""

import sys

# `import openvino` would fork a process that tells Google Analytics. Without this package, it tells nobody.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
