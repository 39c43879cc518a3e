"""The plan of a start: a backend, a layout of weights, and a mode of the cache.

One file keeps a plan for later starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from serve_app.base.engine_options import KernelsName
from serve_app.base.formats import Quantization
from serve_app.engine.costs import profile_cache
from serve_app.engine.costs.cost_model import Profile


@dataclass(frozen=True, slots=True)
class Kernels:
    """A backend, and llama.cpp's layout of the weights."""

    backend: KernelsName = "llama.cpp"
    repack: bool = True
    """Whether llama.cpp lays the weights out anew when it loads them, for kernels of few rows."""
    many_from: int | None = None
    """Rows of a batch from which on it is computed over other weights than those for few rows. llama.cpp's
    are repacked for few, and as the file has them for many. OpenVINO's are those of the file for few, and
    of `quantization` for many. None: all batches have the same."""
    quantization: Quantization = "none"
    """How OpenVINO's products are rounded further."""

    @property
    def quantizations(self) -> tuple[Quantization, ...]:
        """The kinds of converted weights that OpenVINO needs."""
        return (self.quantization,) if self.many_from is None else (self.quantization, "none")

    def __str__(self) -> str:
        many = "" if self.many_from is None else f" for batches of {self.many_from} rows and more"
        if self.backend == "openvino":
            rounded = "" if self.quantization == "none" else f", {self.quantization}"
            return f"OpenVINO{rounded}{many}"
        layout = "repacked" if self.repack else "as they are stored"
        if many:
            layout += f", and as they are stored{many}"
        return f"llama.cpp, weights {layout}"


REPACKED, AS_STORED = Kernels(), Kernels(repack=False)
OPENVINO = Kernels("openvino", repack=False)
OPENVINO_W8A8 = replace(OPENVINO, quantization="w8a8")
BOTH, OPENVINO_BOTH = Kernels(many_from=0), replace(OPENVINO_W8A8, many_from=0)
"""Both kinds of weights, before it is known from how many rows on."""


@dataclass(frozen=True, slots=True)
class Mode:
    """The kind of attention and of cache that a context is made with."""

    flash_attn: bool
    kv_unified: bool
    paged: bool = False
    """Whether slots have blocks of a cache, which those that begin alike share. It is not unified then."""

    @property
    def mixes(self) -> bool:
        """Whether a batch costs what its rows do, whatever slots they are of."""
        return self.kv_unified or self.paged

    def __str__(self) -> str:
        if self.paged:
            return "paged KV cache"
        cache = "unified" if self.kv_unified else "split"
        return f"{cache} KV cache, flash attention {'on' if self.flash_attn else 'off'}"


PAGED = Mode(flash_attn=True, kv_unified=False, paged=True)
"""OpenVINO's only mode."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The mode of the cache, and what batches cost in it."""

    mode: Mode
    reason: str
    profile: Profile
    other: tuple[Mode, Profile] | None = None
    """The best mode with the other kind of cache, if both kinds are open."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions of a start: the kernels before the weights are loaded, the cache then. The first
    three fields are of this start, the others as they were measured."""

    kernels: Kernels = REPACKED
    why: str = "as configured"
    converts: bool = False
    """Whether the model is converted beside the requests, for OpenVINO at later starts."""
    llama_cpp: Kernels = REPACKED
    """The fastest of llama.cpp's layouts."""
    openvino: Kernels | None = None
    """OpenVINO's, if they are faster than that."""
    reason: str = ""
    conversion_s: float = 0.0
    """The seconds in which the whole model is converted."""
    is_certain: bool = False
    """Whether the kernels need not be measured again."""
    caches: Mapping[str, CachePlan] = field(default_factory=dict)
    """The last part of the plan, by kernels: the next start may have others."""
    name: str = ""
    """The name of the file that keeps the plan; none does without one."""

    def __str__(self) -> str:
        return f"{self.kernels}: {self.why}"

    @property
    def cache(self) -> CachePlan | None:
        """The part that is measured with the weights loaded, if it is known."""
        return self.caches.get(str(self.kernels))

    def keep(self, folder: Path | None, cache: CachePlan) -> None:
        """Have later starts begin with that."""
        if self.name:
            caches = {**self.caches, str(self.kernels): cache}
            profile_cache.save(folder, self.name, replace(self, caches=caches))


LLAMA_CPP_PLAN, OPENVINO_PLAN = Plan(), Plan(OPENVINO)
"""Plans of a backend that is named. They are not kept."""
