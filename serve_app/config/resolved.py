"""The resolved configuration, with nothing left open: what the deployments are made with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from serve_app.base.engine_options import EngineOptions
from serve_app.base.values.adapters import Adapters, AdapterUse
from serve_app.config.defaults import ModelDefaults
from serve_app.config.sources import AdapterConfig, DownloadsConfig, ModelSource, ProjectorSource


@dataclass(frozen=True, slots=True)
class OnDemandSettings:
    """The settings of a model that is loaded when somebody asks for it. Its processes stay."""

    keep_alive_s: float
    num_cpus: float
    """CPUs of a replica while the model is loaded."""
    max_on_node: int
    has_peers: bool
    """Whether the model may have several replicas, which give each other prefixes."""
    max_loaded: int = 1
    """Most replicas of all such models that are loaded on a node at once."""
    reserved_cpus: float = 0.0

    def beside_others(self, max_models: int, part: float) -> OnDemandSettings:
        """The settings where so many models are loaded at once, which are this part of all. Together they
        reserve the CPUs that the loaded ones take."""
        reserved_cpus = math.floor(100 * part * self.num_cpus) / 100
        max_loaded = max_models * self.max_on_node
        return replace(self, max_loaded=max_loaded, reserved_cpus=reserved_cpus)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model as it was decided where the configuration was read, the same in every replica."""

    id: str
    aliases: tuple[str, ...]
    tags: tuple[str, ...]
    defaults: ModelDefaults
    source: ModelSource
    """Source of the file, a repository at one commit: each replica gets the same file."""
    downloads: DownloadsConfig
    options: EngineOptions
    system_prompts: tuple[str, ...]
    """System prompts whose tokens each replica pins: it has the vocabulary."""
    threads: int | None
    """Configured threads; None lets each replica count its own cores."""
    n_replicas: int
    """The number of replicas, unless the deployment says otherwise."""
    stages: int
    """The replicas that compute the model together, each a stage of it."""
    sizing: str
    """The reason for that number, and each one's part of the machine, for people."""
    num_cpus: float
    """The CPUs that Ray reserves for each replica, unless the deployment says otherwise."""
    place_cpus: int = 0
    """The CPUs that a replica has in turns with other models, whatever is reserved; 0: its own."""
    weight_bytes: int = 0
    """Bytes of the model's files, if they were found where the configuration was read."""
    on_demand: OnDemandSettings | None = None
    data_at_rest: bool = True
    """Whether clients' texts may lie on disks, wherever that is."""
    encrypts_folders: bool = False
    """Whether folders with clients' texts must be on encrypted file systems."""
    batches_may_scale: bool = False
    """Whether autoscaling counts what is in the background."""
    memory_shares: tuple[str, ...] = ()
    """Options that each replica bounds by its node's memory: see `sizing.shares_of_memory`."""
    adapters: tuple[AdapterConfig, ...] = ()
    projector: ProjectorSource | None = None
    draft: ModelSource | None = None
    waits_for_requests: bool = False
    """Whether it may be that no replica has the model loaded because nobody has asked."""

    @property
    def adapter_uses(self) -> Adapters:
        """The adapters as requests that name them have them."""
        return tuple(AdapterUse(one.id, one.scale) for one in self.adapters)
