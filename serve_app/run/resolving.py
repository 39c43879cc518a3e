"""Decides what the configuration of a model leaves open, by its files and by a machine.

No weights are loaded.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from serve_app.base.errors import ConfigError
from serve_app.base.sampling import Api
from serve_app.config.defaults import ModelDefaults
from serve_app.config.resolved import OnDemandSettings, ResolvedModel
from serve_app.config.sampling_fields import read_params
from serve_app.config.schema import AppConfig, DefaultsConfig, EngineConfig, ModelConfig
from serve_app.config.serve_options import RayServeOptions
from serve_app.config.sources import AdapterConfig, DownloadsConfig, ModelSource, ProjectorSource
from serve_app.engine.backends.draft_model import N_CTX, check_draft, check_own_layers, slot_bytes
from serve_app.kernels.llama.model import Model
from serve_app.kernels.llama.vision.senses import ProjectorFile
from serve_app.kernels.openvino.convert import shape_of
from serve_app.kernels.openvino.parts import StageNode, fewest_stages
from serve_app.prompt.tokenizer import open_tokenizer
from serve_app.run import sizing
from serve_app.run.placement import machine, plan
from serve_app.run.placement.machine import Machine, oversubscription
from serve_app.run.placement.plan import Share
from serve_app.run.sizing import ModelNeeds
from serve_app.store import models as store
from serve_app.store.remote import UnreachableError
from serve_app.store.shared_entries import MOST_ADDED

logger = logging.getLogger("corral.config")


def resolve(
    app: AppConfig,
    here: Machine | None = None,
    *,
    n_resolved: int = 0,
    left_out: dict[str, str] | None = None,
    only_here: bool = False,
) -> list[ResolvedModel]:
    """Decide what the configuration leaves open, from what the model files begin with and from a
    machine, by default this one. All models must fit on it, but of those that are loaded on demand,
    `max_loaded_models` at once. `manage_models` keeps places for as many. The first `n_resolved` models
    take their places only, and are not in the result. With `left_out`, a model whose files cannot be used
    is not in the result either, and the reason is put there. One model at least must be left. With
    `only_here`, no replica runs on another machine, which may have files that this one lacks. Raises
    ConfigError that names the model."""
    here = here or machine.read_machine()
    models, downloads = app.models, app.downloads
    max_loaded, more_may_come = app.max_loaded_models, app.manage_models
    n_on_demand = sum(model.keep_alive is not None for model in models)
    n_at_once = max_loaded if more_may_come else min(n_on_demand, max_loaded)
    n_places = len(models) - n_on_demand + n_at_once
    divided = any(map(names_its_share, models))
    shares = plan.shares(here, n_places, divided=divided)
    always, when_asked_for = iter(shares[n_at_once:]), itertools.cycle(shares[:n_at_once])
    candidates: dict[int, _Candidate] = {}
    needs: list[sizing.Need] = []
    for i, model in enumerate(models):
        share = next(always if model.keep_alive is None else when_asked_for)
        if i < n_resolved:
            needs.append(sizing.UNKNOWN)
            continue
        if names_its_share(model):
            share = plan.whole_share(here, n_places)
        try:
            candidate = _find(
                model, share, here.memory_bytes // n_places, downloads, only_here=only_here
            )
            needs.append(_need(candidate, here))
            candidates[i] = candidate
        except (ConfigError, OSError) as error:
            if left_out is None or not isinstance(error, _FileError):
                raise ConfigError(f"models ({model.id}): {error}") from None
            left_out[model.id] = str(error)
            needs.append(sizing.NOTHING)
    free, total = (
        _divide(n_bytes, models, needs, n_at_once, more_may_come=more_may_come)
        for n_bytes in (here.memory_bytes, here.total_bytes)
    )
    resolved = []
    for i, candidate in candidates.items():
        try:
            undecided = _resolve(candidate, app, here, free[i], total[i])
        except ConfigError as error:
            raise ConfigError(f"models ({candidate.model.id}): {error}") from None
        on_demand = undecided.on_demand
        if on_demand is not None:
            n_processes = max(n_on_demand, 2 * MOST_ADDED) if more_may_come else n_on_demand
            on_demand = on_demand.beside_others(max_loaded, min(1.0, n_at_once / n_processes))
        resolved.append(replace(undecided, on_demand=on_demand))
    if left_out and not resolved:
        raise ConfigError("\n".join(f"models ({name}): {why}" for name, why in left_out.items()))
    return resolved


def check_files(app: AppConfig) -> dict[str, str]:
    """Open the models' files that lie on this machine, as a start does, but without weights. Returns what
    is wrong, by the models' ids."""
    problems = {}
    for model in app.models:
        try:
            _check_files(model, app.downloads)
        except (ConfigError, OSError) as error:
            problems[model.id] = str(error)
    return problems


def _check_files(model: ModelConfig, downloads: DownloadsConfig) -> None:
    """Raises ConfigError, OSError."""
    sources = (draft_source(model), *(one.source for one in model.adapters))
    for source in (source for source in sources if source is not None and source.path):
        store.vocabulary(source, downloads)
    projector, source = model.projector or None, model.source
    if projector is not None and (projector.path or projector.builtin):
        with _naming("projector"):
            ProjectorFile(store.vocabulary(projector, downloads))
    if source.path or source.builtin:
        opened = _open_model(model, source, downloads)
        _with_draft(ModelNeeds.of(opened), opened, model, downloads)


class _FileError(ConfigError):
    """A file of a model cannot be used."""


@contextmanager
def _file_errors() -> Iterator[None]:
    """A block that looks up and reads files of a model. Raises _FileError."""
    try:
        yield
    except (ConfigError, OSError) as error:
        raise _FileError(str(error)) from None


def names_its_share(model: ModelConfig) -> bool:
    """Whether the configuration says what a replica has of a machine."""
    engine, reserved = model.engine, model.serve.num_cpus
    sizes = (engine.threads, engine.threads_batch, engine.numa, reserved)
    return any(size is not None for size in sizes)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A model with what its files tell, and its share of the cores."""

    model: ModelConfig
    share: Share
    stages: int
    source: ModelSource
    projector: ProjectorSource | None
    needs: ModelNeeds | None
    """The model's needs; None if the files are on other machines only."""
    adapters: tuple[AdapterConfig, ...]
    draft: ModelSource | None


def _find(
    model: ModelConfig,
    share: Share,
    memory_bytes: int,
    downloads: DownloadsConfig,
    *,
    only_here: bool,
) -> _Candidate:
    """The figures that the model's files tell. Raises ConfigError and OSError."""
    stages = model.engine.stages
    if stages == "auto":
        with _file_errors():
            stages = _fewest_stages(model, memory_bytes, downloads)
    if stages > 1:
        engine = model.engine.model_copy(update={"backend": "openvino", "stages": stages})
        model = model.model_copy(update={"engine": engine})
        share = replace(share, n_replicas=stages, reason=f"there are {stages} stages")
    with _file_errors():
        source, projector, needs = _look_up(model, downloads, only_here=only_here)
        adapters = tuple(pinned_adapter(one, downloads) for one in model.adapters)
        draft = pinned_source("engine.draft", draft_source(model), downloads)
    if stages > 1:
        needs = needs and replace(needs, weight_bytes=needs.weight_bytes // stages)
    return _Candidate(model, share, stages, source, projector, needs, adapters, draft)


def _need(candidate: _Candidate, here: Machine) -> sizing.Need:
    """The memory that all replicas of the model on this machine can use. Raises ConfigError."""
    if candidate.needs is None or candidate.stages > 1:
        return sizing.UNKNOWN
    _, reserved, n_together = _reserve(candidate.model, candidate.share, here)
    cores = _cores(candidate.model.engine, candidate.share, here, reserved)
    return sizing.need(candidate.model.engine, candidate.needs, cores=cores, n_replicas=n_together)


def _divide(
    memory_bytes: int,
    models: Sequence[ModelConfig],
    needs: Sequence[sizing.Need],
    n_at_once: int,
    *,
    more_may_come: bool,
) -> list[int]:
    """Each model's part of so much memory. `n_at_once` models on demand have a part, which suits any."""
    stay = [model.keep_alive is None for model in models]
    go = [need for need, stays in zip(needs, stay, strict=True) if not stays]
    of_any = sizing.UNKNOWN if more_may_come else max(go, default=sizing.NOTHING)
    parts = sizing.divide(memory_bytes, [*itertools.compress(needs, stay), *[of_any] * n_at_once])
    each = iter(parts)
    return [next(each) if stays else parts[-1] for stays in stay]


def _resolve(
    candidate: _Candidate, app: AppConfig, here: Machine, memory_bytes: int, total_bytes: int
) -> ResolvedModel:
    """Raises ConfigError. `memory_bytes` are free for the model's replicas here, of `total_bytes` that they
    may take when those before them are gone."""
    model, share, needs, stages = (
        candidate.model,
        candidate.share,
        candidate.needs,
        candidate.stages,
    )
    if stages == 1 and needs is not None:
        share = _with_room(model, share, needs, total_bytes)
    num_cpus, reserved, n_together = _reserve(model, share, here)
    has_peers = model.serve.autoscaling_config is not None or share.n_replicas > 1
    options = sizing.resolve(
        model.engine,
        needs,
        cores=_cores(model.engine, share, here, reserved),
        memory_bytes=memory_bytes,
        n_replicas=n_together,
    )
    return ResolvedModel(
        id=model.id,
        aliases=tuple(model.aliases),
        tags=tuple(model.tags),
        defaults=model_defaults(model.defaults),
        source=candidate.source,
        downloads=app.downloads,
        options=options,
        system_prompts=tuple(model.engine.system_prompts),
        threads=model.engine.threads,
        n_replicas=share.n_replicas,
        stages=stages,
        sizing=f"{share.reason}; {_memory_report(memory_bytes, n_together)}",
        num_cpus=num_cpus,
        place_cpus=share.place_cpus,
        data_at_rest=app.data_at_rest is True,
        encrypts_folders=app.data_at_rest == "encrypted",
        batches_may_scale=app.ingress.batch.may_scale,
        memory_shares=sizing.shares_of_memory(model.engine),
        adapters=candidate.adapters,
        projector=candidate.projector,
        draft=candidate.draft,
        waits_for_requests=model.keep_alive is not None
        or model.serve.scaling_bound("min_replicas") == 0,
        on_demand=None
        if model.keep_alive is None
        else OnDemandSettings(model.keep_alive, reserved, n_together, has_peers=has_peers),
    )


def _fewest_stages(model: ModelConfig, memory_bytes: int, downloads: DownloadsConfig) -> int:
    """The fewest stages that hold a model with the caches of all their engines, each on a node of its
    own. The node is the smallest one of Ray, or a machine with so much memory if Ray does not run.
    Raises ConfigError."""
    source = store.pin_source(model.source, downloads)
    opened = Model(store.vocabulary(source, downloads), vocab_only=True)
    reserved = model.serve.num_cpus
    shape = shape_of(opened.files, model.engine.quantization)
    nodes = _memory_of_nodes(reserved or 1) or [memory_bytes]
    node = StageNode(memory_bytes=min(nodes) - sizing.PROCESS_BYTES)
    _, n_tokens = sizing.fewest_tokens(model.engine, opened.n_ctx_train)
    stages = fewest_stages(shape, node, n_tokens)
    try:
        model.check_stages(stages)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if stages > len(nodes):
        logger.warning(
            "Model %s needs %d nodes with %.1f GiB of memory, and there are %d.",
            *(model.id, stages, min(nodes) / 2**30, len(nodes)),
        )
    return stages


def _memory_of_nodes(num_cpus: float) -> list[float]:
    """The bytes of memory of each node of Ray with so many CPUs; none if Ray does not run."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return []
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [each["memory"] for each in resources if each.get("CPU", 0) >= num_cpus]


def _with_room(model: ModelConfig, share: Share, needs: ModelNeeds, total_bytes: int) -> Share:
    """No more replicas than all memory has room for: those that are to be replaced may take some now."""
    if share.n_replicas == 1:
        return share
    n = sizing.fitting_replicas(model.engine, needs, share.n_replicas, total_bytes)
    return share if n == share.n_replicas else plan.merge(share, n)


def _reserve(model: ModelConfig, share: Share, here: Machine) -> tuple[float, float, int]:
    """The CPUs that Ray reserves for a replica unless the deployment says otherwise, and those that it
    does reserve. The third is how many replicas may run here at once. Raises ConfigError."""
    num_cpus = _num_cpus(model, share, here)
    configured = model.serve.num_cpus
    reserved = num_cpus if configured is None else configured
    return num_cpus, reserved, plan.n_together(here, reserved, _most_replicas(model.serve, share))


def _most_replicas(configured: RayServeOptions, share: Share) -> int:
    scaled = configured.scaling_bound("max_replicas")
    most = scaled or configured.num_replicas or share.n_replicas
    return min(most, configured.max_replicas_per_node or most)


def _cores(engine: EngineConfig, share: Share, here: Machine, reserved: float) -> int:
    threads = max(engine.threads or 0, engine.threads_batch or 0)
    return min(threads or share.n_cores, plan.n_cores(here, share.place_cpus or reserved))


def _memory_report(memory_bytes: int, n_replicas: int) -> str:
    gib = f"sized for {memory_bytes / 2**30:.1f} GiB of memory"
    return gib if n_replicas == 1 else f"{gib} for {n_replicas} replicas"


def _num_cpus(model: ModelConfig, share: Share, here: Machine) -> float:
    """The CPUs that Ray reserves for a replica, unless the deployment says otherwise: a core for
    each thread. Raises ConfigError for threads that cannot have a CPU each; the replica looks
    again, on its node."""
    engine, reserved = model.engine, model.serve.num_cpus
    threads, cpus = max(engine.threads or 0, engine.threads_batch or 0), here.n_cpus
    complaint = None
    if reserved is None:
        whose = (
            "all that this machine may use (if replicas run on others, set "
            "serve.ray_actor_options.num_cpus)"
        )
        complaint = oversubscription(threads, cpus, whose)
    elif reserved > 0:
        whose = "which serve.ray_actor_options.num_cpus reserves"
        complaint = oversubscription(threads, max(1, math.floor(reserved)), whose)
    if complaint:
        raise ConfigError(complaint)
    cpus_of_threads = plan.cpus_for(here, threads)
    return max(share.num_cpus, cpus_of_threads) if engine.threads is None else cpus_of_threads


def _look_up(
    model: ModelConfig, downloads: DownloadsConfig, *, only_here: bool
) -> tuple[ModelSource, ProjectorSource | None, ModelNeeds | None]:
    """The sources of the model and of its projector at the version that they are now, and what the model
    needs, without its weights: None if it can be neither found here nor asked for, and the configuration
    leaves nothing open. Raises ConfigError for a model that cannot be served."""
    path = None if model.source.path is None else model.source.path.expanduser()
    is_sized = _names_its_slots(model)
    if is_sized and not only_here and path is not None and not path.exists():
        # Replicas look for themselves.
        return model.source, _projector(model, model.source, None, downloads), None
    try:
        source = store.pin_source(model.source, downloads)
        opened = _open_model(model, source, downloads)
        needs = _with_draft(ModelNeeds.of(opened), opened, model, downloads)
        projector = _projector(model, source, opened, downloads)
        if projector is not None and not is_sized:
            with _naming("projector"):  # with a hole in its file, maybe
                n_bytes = store.vocabulary(projector, downloads).stat().st_size
            needs = replace(needs, weight_bytes=needs.weight_bytes + n_bytes)
        return source, projector, needs
    except UnreachableError:
        if not is_sized:
            raise
        return model.source, _projector(model, model.source, None, downloads), None


def _open_model(model: ModelConfig, source: ModelSource, downloads: DownloadsConfig) -> Model:
    """The model without its weights, of which everything is read that a worker is going to need. Raises
    ConfigError, also for a chat template or recommended sampling parameters that cannot be used."""
    defaults = model_defaults(model.defaults)
    path, configured = str(store.vocabulary(source, downloads)), model.engine.embedding_pooling
    pooling = None if configured == "auto" else configured
    tokenizer = open_tokenizer(path, defaults.chat_template, pooling)
    try:
        tokenizer.recommended_sampling  # noqa: B018  # is read here
    except ValueError as error:
        raise ConfigError(f"the sampling parameters that the file recommends: {error}") from None
    return tokenizer.model


def model_defaults(configured: DefaultsConfig) -> ModelDefaults:
    """The configured defaults of requests. Raises ConfigError for a template that cannot be read."""
    template, kwargs = configured.chat_template, dict(configured.chat_template_kwargs)
    if configured.chat_template_file is not None:
        try:
            template = configured.chat_template_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"defaults.chat_template_file: {error}") from None
    if configured.reasoning != "auto":
        kwargs["enable_thinking"] = configured.reasoning == "on"
    return ModelDefaults(
        read_params(configured, Api.OPENAI),
        configured.max_tokens,
        configured.system_prompt,
        template,
        kwargs,
        configured.reasoning_budget,
        configured.reasoning_budget_message,
        configured.reasoning_format,
        tuple(configured.adapters),
        configured.prompts,
    )


def _names_its_slots(model: ModelConfig) -> bool:
    """Whether the configuration leaves nothing open that depends on the model's size."""
    return model.engine.n_slots is not None and model.engine.n_ctx_slot is not None


def pinned_adapter(adapter: AdapterConfig, downloads: DownloadsConfig) -> AdapterConfig:
    """The adapter with a source of which every node gets the same bytes. Raises ConfigError."""
    source = pinned_source(f"adapters ({adapter.id})", adapter.source, downloads)
    return adapter.model_copy(update={"source": source})


def pinned_source(
    name: str, source: ModelSource | None, downloads: DownloadsConfig
) -> ModelSource | None:
    """A source that llama.cpp reads, the same on every node. Raises ConfigError that begins with the
    name."""
    if source is None:
        return None
    try:
        with _naming(name):
            return store.pin_source(source, downloads)
    except UnreachableError:  # replicas look for themselves
        return source


def draft_source(model: ModelConfig) -> ModelSource | None:
    return None if model.engine.draft is None else model.engine.draft.source


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Have the messages of ConfigErrors begin with the field, but for an UnreachableError's."""
    try:
        yield
    except UnreachableError:
        raise
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None


def _projector(
    model: ModelConfig, source: ModelSource, opened: Model | None, downloads: DownloadsConfig
) -> ProjectorSource | None:
    """The projector that is configured, or that the model's repository has, if that can be asked: `source`
    is pinned, and `opened` its model, None if it cannot. Raises ConfigError."""
    projector = model.projector
    if projector is False or (projector is None and model.engine.backend == "openvino"):
        return None
    try:
        with _naming("projector"):
            if projector is not None:
                return store.pinned_projector(projector, downloads)
            if opened is None:
                return None
            return _projector_beside(model.id, source, opened, downloads)
    except UnreachableError as error:
        if projector and store.names_a_file(projector):
            return projector  # replicas look for themselves
        raise ConfigError(f"projector: {error}") from None


def _projector_beside(
    model_id: str, source: ModelSource, opened: Model, downloads: DownloadsConfig
) -> ProjectorSource | None:
    """The projector that the model's repository has. If that cannot be used, a warning says so: nobody
    asked for it. Raises UnreachableError."""
    try:
        projector = store.projector_beside(source, downloads)
        if projector is None or projector.builtin:
            return projector
        n_embd = opened.meta_int("embedding_length", 0)
        reason = ProjectorFile(store.vocabulary(projector, downloads)).why_unusable(n_embd)
    except UnreachableError:
        raise
    except ConfigError as error:
        projector, reason = None, str(error)
    if reason is None:
        return projector
    logger.warning(
        "Model %s reads text only, as the projector beside it cannot be used: %s To have another one, name "
        "it in `projector`. To have none, and not this warning: `projector: false`.",
        model_id,
        f"{reason.rstrip('.')}.",
    )
    return None


def _with_draft(
    needs: ModelNeeds, target: Model, model: ModelConfig, downloads: DownloadsConfig
) -> ModelNeeds:
    """The target's needs, with its draft model's. Raises ConfigError for a draft that cannot propose for
    it."""
    if model.engine.draft is not None and model.engine.draft.own_layers:
        check_own_layers(target)
        return replace(needs, draft_bytes=slot_bytes(target))
    source = draft_source(model)
    if source is None:
        return needs
    is_sized = _names_its_slots(model)
    if is_sized and source.path is not None and not source.path.expanduser().is_file():
        return needs  # replicas on other nodes look for themselves
    try:
        with _naming("engine.draft"):
            draft = Model(store.vocabulary(source, downloads), vocab_only=True)
    except UnreachableError:
        if not is_sized:
            raise
        return needs
    check_draft(target, draft)
    return needs.with_draft(ModelNeeds.of(draft), N_CTX)
