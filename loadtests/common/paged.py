"""OpenVINO's paged context for one sequence, as the engine compiles it. Needs corral[openvino]."""

from __future__ import annotations

from serve_app.folders import cache_folder
from serve_app.llama.model import Model
from serve_app.openvino.convert import converted
from serve_app.openvino.folder import ConvertedModels
from serve_app.openvino.paged.blocks import BLOCK
from serve_app.openvino.paged.compiling import CacheType
from serve_app.openvino.paged.context import PagedContext, PagedOptions


def opened(model: Model, n_ctx: int, threads: int, cache_type: CacheType) -> PagedContext:
    """With room for so many tokens, and warmed up. The model is converted where Corral would do so, and
    needs its vocabulary only. Raises ConfigError."""
    models = ConvertedModels(cache_folder() / "openvino")
    context = PagedContext(
        converted(model.files, model.fingerprint(), models),
        model,
        PagedOptions(
            n_sequences=1,
            n_ctx_slot=n_ctx,
            n_blocks=-(-n_ctx // BLOCK),
            threads=threads,
            cache_type=cache_type,
        ),
    )
    context.warm_up()
    return context
