"""The fields of the configuration: what `applications[0].args` in serve_config.yaml may hold.

Unknown fields and impossible values are refused by name. `corral check FILE` starts nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic.networks import IPvAnyNetwork

from serve_app.base.engine_options import MAX_STALL_MS
from serve_app.base.errors import ConfigError
from serve_app.base.formats import (
    BackendName,
    CacheType,
    EmbeddingPooling,
    LoadMode,
    NumaStrategy,
    Quantization,
)
from serve_app.base.sampling import Api
from serve_app.config.addresses import is_loopback
from serve_app.config.problems import describe_errors
from serve_app.config.sampling_fields import takes_sampling
from serve_app.config.serve_options import RayServeOptions
from serve_app.config.sources import (
    MODEL_ID,
    NO_DOWNLOADS,
    AdapterConfig,
    DownloadsConfig,
    KeepAlive,
    ModelSource,
    ProjectorSource,
    Section,
)

_HOST_NAME = r"^(\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|[0-9a-fA-F:]+)$"
_MODEL_NAME = rf"^\*$|{MODEL_ID}"
_INGRESS_ONGOING_REQUESTS = 1000


class DraftConfig(Section):
    """A small model that proposes tokens, or the model's own layers: exactly one of the fields."""

    source: ModelSource | None = None
    """The draft model's GGUF file, of the same vocabulary: every kind of source that a model has."""
    own_layers: bool = False
    """The model's own prediction layers (MTP), if its file has them."""

    @model_validator(mode="after")
    def _exactly_one(self) -> DraftConfig:
        if (self.source is not None) == self.own_layers:
            raise ValueError("give exactly one of source and own_layers: true")
        return self


class EngineConfig(Section):
    """The engine of a replica. Fields that are not set are decided from the model and the machine."""

    n_slots: PositiveInt | None = None
    """Sequences that run at once in a replica. Default: 4 for each core, 8 to 32, fewer if memory is
    short."""
    n_ctx_slot: Annotated[int, Field(ge=2)] | None = None
    """Tokens that a request may have, prompt and answer together. Default: what the model was trained for,
    or `n_ctx` if that is less. With `kv_unified: false`, no more than a slot's share. If it is more than
    4096 and `n_slots` and `n_ctx` are not set, the slots share the tokens that memory has room for."""
    n_ctx: Annotated[int, Field(ge=2)] | None = None
    """Tokens that all slots hold together. A request that is longer than an equal share needs a unified
    KV cache, and waits until it fits beside the running requests. When the cache is full, idle slots give
    way first, then the youngest running request. That request waits, and goes on later with its text
    unbroken. Default: `n_ctx_slot` for each slot if that is set; else 4096 for each slot, less if memory
    is short."""
    kv_unified: bool | Literal["auto"] = "auto"
    """Whether all slots share the cells of the KV cache. Sharing is faster for common beginnings and slower
    for unrelated prompts. `auto` takes what is measured to be faster, for a common beginning if there are
    `system_prompts`. It changes when the traffic favours the other kind, and logs why. Beside running
    streams it keeps within `max_stall_ms`. It also becomes unified for a request that is longer than a
    slot's share. Streams wait once for that if they leave no gap within 5 seconds."""
    threads: PositiveInt | None = None
    """Threads that llama.cpp computes a single row with. The replica's cores are those of its
    `num_cpus`, which counts hyper-threads, within the affinity mask and the CPU quota. Default: the
    physical cores that the replica may use."""
    threads_batch: PositiveInt | None = None
    """Threads for batches of several rows: prompts, and several sequences at once. Default: `threads`."""
    numa: NumaStrategy | None = None
    """How llama.cpp spreads the threads of one large replica over NUMA nodes, as in llama-server. With
    `distribute` and `isolate`, the replica is not pinned to cores."""
    n_batch: PositiveInt = 512
    """Most prompt tokens in one step. The next token of each running sequence comes on top."""
    max_waiting: NonNegativeInt | None = None
    """Requests that may wait for a slot in one replica. The next one is refused with 429. Default:
    twice `n_slots`."""
    max_first_token_s: PositiveFloat | None = 60
    """Longest time, in seconds, to a request's first token. A request whose first token is likely to come
    later is refused with 429 at once. The forecast counts the client's own queue, its turns among other
    clients, the prompts before it, its own prompt, and how wrong forecasts have been. So at overload, the
    requests that are served are served in time. A prompt that takes more than half of that by itself may
    take twice its own time. `null` sets no bound."""
    flash_attn: bool | Literal["auto"] = "auto"
    """Flash attention. `auto` takes what is measured to be faster, within `max_stall_ms`."""
    cache_type_k: CacheType = "f16"
    """Format of the keys in the KV cache. Quantised formats take less memory and are less exact. Fewer
    than 8 bits [spoil some models](models.md#keys-and-values-of-fewer-bits). OpenVINO has `f16`, and
    `q8_0` or [`bf16`](openvino.md#attention-with-bf16) for keys and values alike."""
    cache_type_v: CacheType = "f16"
    """Format of the values in the KV cache. A quantised one needs `flash_attn`. With OpenVINO, the same as
    `cache_type_k`."""
    quantization: Quantization = "auto"
    """Whether OpenVINO rounds products further than in the file. `w8a8` has weights and activations of 8
    bits with [scales for longer groups](openvino.md#weights-and-activations-of-8-bits). Where the processor
    computes with bf16, keys and values are bf16 in place of f16. It needs `backend: openvino`. `none` has
    the file's weights. `auto` takes what is measured to be faster, with `backend: auto`, and else the
    file's weights."""
    system_prompts: list[Annotated[str, Field(min_length=1)]] = []
    """System prompts that every replica computes when it starts and keeps, each in a slot of its own.
    Chats without tools that begin with one start from there, for every client. Default: none."""
    cache_ram_mib: NonNegativeInt | None = None
    """Memory of each replica for prefixes that lost their slot, in MiB. A chat that comes back starts
    from there. 0 keeps none. Default: an eighth of what the weights leave on the machine that reads the
    configuration, or on the replica's own node if that is less."""
    cache_folder: Path | None = None
    """A folder on each node where prefixes are kept for the next start. They hold what users
    wrote, and only the owner can read them. Delete the files of models that you no longer serve.
    Default: prefixes are lost at the end."""
    slot_folder: Path | None = None
    """A folder on each node where `POST /slots/{id_slot}` saves slots and restores them. The files
    hold what users wrote. A restored slot belongs to the `cache_group` that saved it. Default:
    requests to save and restore are refused."""
    backend: BackendName = "auto"
    """The kernels that compute the model. `openvino` is faster for several sequences at once, slower
    for a single one, and has fewer features: see [OpenVINO](openvino.md). `auto` measures both at
    the first start, and takes the faster one for the slots."""
    stages: PositiveInt | Literal["auto"] = 1
    """Replicas that [compute the model together](deploy/cluster.md#a-model-in-stages), each a part of its
    layers, with OpenVINO's kernels: for a model that is too large for one machine. `auto` takes as few as
    have room for it, by the memory of Ray's nodes."""
    load_mode: LoadMode = "auto"
    """How the weights come into memory. `mlock` keeps them in RAM; `none` reads them instead of mapping
    the file."""
    max_stall_ms: PositiveFloat = MAX_STALL_MS
    """Longest time, in milliseconds, that a running stream should wait between two tokens because of
    others' prompts. Prompts are processed in chunks that fit, by measured times. `.inf` sets no
    bound."""
    speculate: bool = True
    """Whether tokens are drafted from a request's own text and verified together, where that is
    measured to be faster. Greedy text stays the same, except for rounding."""
    draft: DraftConfig | None = None
    """A draft model. Its proposals are verified together, where that is measured to be faster. Default:
    none."""
    context_shift: bool = False
    """Whether a request with `max_tokens` goes on when its context is full. It then drops half of
    the tokens after its first `n_keep`. Otherwise it ends with `length`. A request can override
    this."""
    n_keep: Annotated[int, Field(ge=-1)] = 0
    """First tokens that a context shift keeps. The very first token is always kept. -1 keeps the
    prompt."""
    embedding_pooling: EmbeddingPooling | Literal["auto"] = "auto"
    """How the vectors of a text's tokens become its embedding: their `mean`, the first token's (`cls`)
    or the `last` token's. `none` gives all of them, from `/embedding` only. `rank` makes a reranker or
    a classifier of a model whose file does not say that it is one. `auto` is what the file says, or
    else `mean`."""


@takes_sampling(Api.OPENAI)
class DefaultsConfig(Section):
    """The defaults of requests: every sampling parameter by its name, and these."""

    max_tokens: PositiveInt | None = None
    """Most tokens of an answer."""
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """The system prompt of chats that begin without one."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """A Jinja template to use instead of the file's, or a name that llama.cpp knows, such as `llama3`.
    Models without a template get `chatml`. Default: the file's template."""
    chat_template_file: Path | None = None
    """A file with such a template, on the machine that reads the configuration."""
    chat_template_kwargs: dict[str, Any] = {}
    """More variables for the chat template, such as `enable_thinking: false`. Default: none."""
    reasoning: Annotated[
        Literal["on", "off", "auto"],
        BeforeValidator(
            lambda value: {"True": "on", "False": "off"}.get(str(value), value)
        ),  # YAML's
    ] = "auto"
    """Whether the model thinks before it answers, if its template knows `enable_thinking`. With
    `auto` it does, as at llama-server."""
    reasoning_budget: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1
    """Tokens of reasoning after which the model must answer. -1 sets no bound."""
    reasoning_budget_message: Annotated[str, Field(max_length=1024)] = ""
    """The last words of reasoning whose budget is used up. Default: none."""
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    """`none` leaves reasoning and its tags in the content. Default: `auto`."""
    adapters: list[str] = []
    """The LoRA adapters of requests that name none, by their ids. Default: none."""
    prompts: dict[str, str] = {}
    """Instructions before texts that become vectors, by the names that requests give as `prompt_name` or
    `input_type`, such as `query: "query: "`. Default: none."""

    @model_validator(mode="after")
    def _one_template(self) -> DefaultsConfig:
        if self.chat_template is not None and self.chat_template_file is not None:
            raise ValueError("give chat_template or chat_template_file, not both")
        return self


class ModelConfig(Section):
    """A model that is served, as an autoscaled deployment of its own."""

    id: Annotated[str, Field(pattern=MODEL_ID, max_length=128)]
    """The name that clients put into `model`. A request without `model` gets the first model, and one for
    embeddings or rankings the first that is made for it."""
    aliases: list[Annotated[str, Field(pattern=_MODEL_NAME, max_length=128)]] = []
    """Other names of the model that clients may send. `*` stands for every name that no model has. Default:
    none."""
    tags: list[Annotated[str, Field(min_length=1, max_length=128)]] = []
    """Labels that `/v1/models` shows. Default: none."""
    source: ModelSource
    """The GGUF file, below."""
    adapters: Annotated[list[AdapterConfig], Field(max_length=64)] = []
    """LoRA adapters, below. Default: none."""
    projector: ProjectorSource | Literal[False] | None = None
    """A GGUF file (`mmproj`) for pictures or sounds, from any kind of source. `false` uses none. Default:
    the projector of the source's repository, if there is one. The built-in model has its own, which
    `builtin: true` names. With `engine.backend: openvino`, there is none."""
    defaults: DefaultsConfig = DefaultsConfig()
    """The fields that requests get if they do not set them, below."""
    engine: EngineConfig = EngineConfig()
    """The engine in each replica, below."""
    serve: RayServeOptions = RayServeOptions()
    """[Ray Serve's options](#ray-serve) for the engine's deployment."""
    keep_alive: KeepAlive | None = None
    """Loads the model when a request asks for it, and unloads it when none has for this long: seconds, or a
    text such as `5m`. Other models with `keep_alive` may push it out earlier. Default: the model is always
    loaded."""

    @model_validator(mode="after")
    def _one_way_to_load(self) -> ModelConfig:
        if self.keep_alive is not None and self.serve.num_replicas is not None:
            raise ValueError("give keep_alive or serve.num_replicas, not both")
        return self

    @model_validator(mode="after")
    def _can_have_stages(self) -> ModelConfig:
        if self.engine.stages != 1:
            self.check_stages(1 if self.engine.stages == "auto" else self.engine.stages)
        return self

    def check_stages(self, n_stages: int) -> None:
        """Raises ValueError if something does not go with so many stages."""
        engine, serve = self.engine, self.serve
        refused = {
            "engine.backend: llama.cpp": engine.backend == "llama.cpp",
            "engine.draft": engine.draft is not None,
            "adapters": bool(self.adapters),
            "projector": bool(self.projector),
            "keep_alive": self.keep_alive is not None,
            "serve.ray_actor_options.num_cpus: 0": serve.num_cpus == 0,
            "serve.max_replicas_per_node": serve.max_replicas_per_node is not None,
            "serve.num_replicas that is no multiple of it": (
                (serve.num_replicas or 0) % n_stages > 0
            ),
            "a bound of serve.autoscaling_config that is no multiple of it": any(
                (serve.scaling_bound(name) or 0) % n_stages
                for name in ("min_replicas", "max_replicas", "initial_replicas")
            ),
        }
        if names := [name for name, is_set in refused.items() if is_set]:
            n = f" ({n_stages})" if engine.stages == "auto" and n_stages > 1 else ""
            raise ValueError(f"engine.stages: {engine.stages}{n} does not go with {names[0]}")

    @model_validator(mode="after")
    def _has_its_adapters(self) -> ModelConfig:
        if unknown := set(self.defaults.adapters) - {adapter.id for adapter in self.adapters}:
            raise ValueError(f"defaults.adapters: the model has no adapter {min(unknown)!r}")
        return self

    @model_validator(mode="after")
    def _projects(self) -> ModelConfig:
        if self.projector and self.projector.builtin and not self.source.builtin:
            raise ValueError("projector.builtin is for the built-in model only")
        return self


class BatchConfig(Section):
    """Files and batches."""

    folder: Path | None = None
    """The folder for files and batches. All nodes with an ingress must see it, on a file system
    with locks. Without it, there are no files and batches."""
    keep_days: PositiveInt = 30
    """Days after which files are deleted, and batches that have ended are forgotten."""
    may_scale: bool = False
    """Whether autoscaling adds replicas for lines that wait. Otherwise lines use only the replicas
    that are there."""


class PriceConfig(Section):
    """The price of a model, in a currency of your choice."""

    prompt: NonNegativeFloat = 0.0
    """The price of a million prompt tokens."""
    cached: NonNegativeFloat | None = None
    """The price of a million prompt tokens that were in the KV cache. Default: that of `prompt`."""
    generated: NonNegativeFloat = 0.0
    """The price of a million generated tokens."""
    compute_second: NonNegativeFloat = 0.0
    """The price of a second of the decoder."""


class WhisperConfig(Section):
    """A Whisper model, which hears files in a process of its own beside each ingress."""

    id: Annotated[str, Field(pattern=MODEL_ID, max_length=128)] = "whisper-1"
    """The name that requests put into `model`."""
    model: Annotated[str, Field(min_length=1)]
    """The model as faster-whisper has it: a folder, a repository such as `Systran/faster-whisper-small`,
    or a size such as `small`. It is downloaded into the cache of Hugging Face's library."""
    threads: PositiveInt | None = None
    """Threads that compute, at a lower priority than the engines'. Default: one a core, in turns with the
    models that share them."""
    keep_alive: KeepAlive = 300
    """The process ends when nobody has asked it for this long: seconds, or a text such as `5m`."""


class IngressConfig(Section):
    """The HTTP side, below."""

    api_key_file: Path | None = None
    """A file with API keys and their limits, on every node that runs the ingress. It is read again when
    it changes. Without one, Corral answers only its own machine."""
    allow_anonymous: bool = False
    """Whether Corral answers every machine without keys."""
    ui: bool | Literal["auto"] = "auto"
    """Whether there is a page for browsers at `/`. With `auto`, only requests to a loopback
    address get it, and only if no HAProxy in front is open to other machines."""
    cors_origins: list[
        Annotated[str, Field(pattern=r"^(\*|localhost|apps|[a-z][a-z0-9+.-]*://[^/]+)$")]
    ] = []
    """Web sites whose pages may use the API, such as `https://chat.example`. `localhost` is every site
    that this machine serves, on any port. `apps` is pages of desktop apps and editors: `app://`,
    `tauri://`, `vscode-webview://` and `vscode-file://`. `*` is all sites. Default: none; with API keys,
    all."""
    sse_ping_interval_s: Annotated[float, Field(ge=-1, le=3600)] = 15.0
    """A stream that is silent for this many seconds sends an event that changes nothing. Proxies and
    clients would give it up otherwise. 0 and -1 turn them off. A request can override this
    (`sse_ping_interval`)."""
    strict: bool = False
    """Whether requests with unknown fields are refused. Otherwise these fields are ignored, and
    the header `x-corral-ignored` of the answer names them."""
    disabled_routes: list[Annotated[str, Field(pattern=r"^(/|(/[A-Za-z0-9._-]+)+)$")]] = []
    """Paths that are switched off, with all paths below them, such as `/slots` and `/metrics`. `/`
    stands for itself only. They answer 501. Default: none."""
    allowed_hosts: list[Annotated[str, Field(pattern=_HOST_NAME)]] = []
    """Host names that clients may use besides `localhost`: `corral.example`, `*.example` for all
    below it, `*` for all. If there is a list, or if only this machine is answered, requests to
    another `Host` are refused. Default: none."""
    picture_hosts: list[Annotated[str, Field(pattern=_HOST_NAME)]] = []
    """Hosts from which Corral fetches pictures that requests name by `http(s)` URLs:
    `images.example`, `*.example` for all below it, `*` for all. It never asks private addresses.
    Default: none."""
    responses_kept_s: Annotated[float, Field(ge=0, le=86400)] = 1800
    """Seconds for which a response of `/v1/responses` is kept after its end, unless its request says
    `store: false`. 0 keeps none."""
    usage_folder: Path | None = None
    """The folder where [usage](usage.md) is kept by key and model, without any text. All nodes with an
    ingress must see it, on a file system with locks. Without it, each ingress replica knows what it has
    served itself since its start."""
    request_log: bool = False
    """Whether the log `corral.requests` has a line of JSON for each answer: key, model, tokens and times,
    and no texts."""
    log_prompts: bool = False
    """Whether these lines have the requests' bodies, which is what clients write. Needs `request_log`."""
    trusted_proxies: list[IPvAnyNetwork] = []
    """Addresses and networks of reverse proxies that say who their users are: see
    [Users of a proxy](security.md#users-of-a-proxy). Needs `api_key_file`. Default: none."""
    prices: Annotated[dict[str, PriceConfig], Field(max_length=1000)] = {}
    """[Prices](usage.md#prices) by model, below. `*` is every other model. Default: none."""
    whisper: WhisperConfig | None = None
    """A Whisper model for [transcriptions](pictures.md#whisper), below. Default: none."""
    batch: BatchConfig = BatchConfig()
    """Files and batches, below."""
    serve: RayServeOptions = RayServeOptions()
    """[Ray Serve's options](#ray-serve) for the ingress's deployment."""

    @model_validator(mode="after")
    def _needs(self) -> IngressConfig:
        if self.log_prompts and not self.request_log:
            raise ValueError("log_prompts needs request_log")
        if self.trusted_proxies and self.api_key_file is None:
            raise ValueError("trusted_proxies needs api_key_file")
        return self

    @property
    def max_ongoing_requests(self) -> int:
        return self.serve.max_ongoing_requests or _INGRESS_ONGOING_REQUESTS


class AppConfig(Section):
    """The whole application."""

    models: Annotated[list[ModelConfig], Field(min_length=1)]
    """The models, below. A request without `model` gets the first one."""
    ingress: IngressConfig = IngressConfig()
    """The HTTP server, below."""
    downloads: DownloadsConfig = NO_DOWNLOADS
    """The folder of downloaded models, below."""
    data_at_rest: bool | Literal["encrypted"] = True
    """Whether prompts and answers may lie on disks. `false` refuses the options that write them, keeps
    clients' texts out of logs and core dumps, and serves no page. `encrypted` is like `false`, and takes
    folders on encrypted file systems: see [Where prompts and answers lie](data-at-rest.md)."""
    max_loaded_models: PositiveInt = 1
    """Most models with `keep_alive` that are loaded on a machine at once. They share it with those that are
    always loaded."""
    manage_models: bool = False
    """Whether operators may [add and remove models](model-files.md#add-models-while-serving) while Corral
    serves. They are loaded on demand, and `max_loaded_models` places are kept for them."""

    @model_validator(mode="after")
    def _distinct_names(self) -> AppConfig:
        ids = Counter(model.id for model in self.models)
        if twice := [name for name, n in ids.items() if n > 1]:
            raise ValueError(
                f"models: several entries have the id {twice[0]!r}. Give each an id of its own. The name "
                "that clients send can be an alias of one of them"
            )
        names: Counter[str] = Counter()
        for model in self.models:
            names.update([model.id, *model.aliases])
            names.update(f"{model.id}:{adapter.id}" for adapter in model.adapters)
        if twice := sorted(name for name, n in names.items() if n > 1):
            raise ValueError(f"models: two models have the same name ({', '.join(twice)})")
        return self

    @model_validator(mode="after")
    def _nothing_at_rest(self) -> AppConfig:
        if self.data_at_rest is True:
            return self
        written = {"ingress.batch.folder": self.ingress.batch.folder}
        for model in self.models:
            written |= {
                f"models ({model.id}): engine.cache_folder": model.engine.cache_folder,
                f"models ({model.id}): engine.slot_folder": model.engine.slot_folder,
            }
        names = [name for name, folder in written.items() if folder is not None]
        names = [] if self.data_at_rest == "encrypted" else names
        names += ["ingress.ui: true"] if self.ingress.ui is True else []
        names += ["ingress.log_prompts: true"] if self.ingress.log_prompts else []
        if names:
            told = "encrypted" if self.data_at_rest else "false"
            raise ValueError(f"data_at_rest: {told} forbids {', '.join(names)}")
        return self


def parse(args: object, file: Path | None = None) -> AppConfig:
    """Validate `applications[0].args`, of that `file` if one is given. Raises ConfigError, which names
    field that is wrong, and its line in the file."""
    try:
        return AppConfig.model_validate(args)
    except ValidationError as error:
        problems = describe_errors(error, AppConfig, "args", file)
        raise ConfigError(f"invalid configuration: {problems}") from None


def with_models(app: AppConfig, entries: Sequence[object]) -> AppConfig:
    """The configuration with more entries of `models`, which are the last ones. Raises ConfigError."""
    return parse(dict(app) | {"models": [*app.models, *entries]})


def without(app: AppConfig, names: Container[str]) -> AppConfig:
    """The configuration without the models of these names."""
    return app.model_copy(update={"models": [one for one in app.models if one.id not in names]})


def load(path: Path) -> AppConfig:
    """The application's configuration in a Serve config file. Raises ConfigError."""
    try:
        document = yaml.safe_load(path.read_text())
        args = document["applications"][0]["args"]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (KeyError, IndexError, TypeError):
        raise ConfigError(f"{path}: applications[0].args is missing") from None
    app = parse(args, path)
    host = (document.get("http_options") or {}).get("host") or "127.0.0.1"
    open_to_all = app.ingress.api_key_file is None and not app.ingress.allow_anonymous
    if open_to_all and not is_loopback(str(host)):
        raise ConfigError(
            f"{path}: other machines can reach http_options.host: {host}. Set ingress.api_key_file "
            "or ingress.allow_anonymous: true"
        )
    return app
