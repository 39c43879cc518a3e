"""Other programs that batch, beside the engine."""

import serve_app.kernels.openvino  # noqa: F401  # before OpenVINO, which would tell Google
