"""The attacked servers: Corral on loopback, with the models and keys for attacks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from gguf import GGUFReader

from loadtests.common.servers import ROOT, local_command, one_machine_command, running
from loadtests.hostile.attack import ALONE, KEYLESS, SHARED
from loadtests.load.target import Target

DEMO, TEXTS = "corral-demo", "corral-texts"
"""The model that honest users talk to, and another one that has the cores in turns with it."""
N_FILES = 1024
"""The files that the server without Ray may have open."""
N_SLOTS, MAX_WAITING, N_CTX_SLOT = 8, 96, 4096
"""Of the model that honest users talk to."""
PRE_TOKENIZERS = ("tekken", "gpt-4o", "deepseek-llm", "deepseek-v3")
"""Those for which llama.cpp splits texts with std::regex; the models have these names."""
HONEST = tuple(f"honest-{number}" for number in range(16))
MANY = tuple(f"mallory-{number}" for number in range(16))
METERED, LIMITED = ("metered-0", "metered-1"), "limited"
METERED_TOKENS, LIMITED_REQUESTS = 2000, 4
ELSEWHERE, SPENT = "elsewhere", "spent"
"""Keys that may use another model only, and one token a day."""
NAMES = (*HONEST, *MANY, *METERED, LIMITED, ELSEWHERE, SPENT, "mallory", "alice", "bob")
KEYS: Mapping[str, str] = {name: f"sk-hostile-test-{name}" for name in NAMES}
"""The secret of every API key, by its name."""
_PADDING = "<|endoftext|>"
_LONG = 256
"""Bytes of the longest token, about what large vocabularies have: what cannot fit is refused by it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A server that runs."""

    target: Target
    directory: Path
    """The mark of its processes."""
    keys: Mapping[str, str]


@contextmanager
def started(kind: str) -> Iterator[Setup]:
    """One of the servers. Raises RuntimeError with its log if it does not start."""
    keys = {} if kind == KEYLESS else KEYS
    models = [_demo(), *map(_with_pre_tokenizer, PRE_TOKENIZERS if kind == KEYLESS else ())]
    if kind == SHARED:
        models = [in_turns(DEMO), in_turns(TEXTS)]

    def command(directory: Path, port: int) -> Sequence[str | Path]:
        checks = {"health_check_period_s": 1.0, "health_check_timeout_s": 5.0}
        ingress: dict[str, Any] = {"serve": {"num_replicas": 1} | checks}  # no scaling: none may go
        if keys:
            models[0]["engine"]["slot_folder"] = str(directory / "slots")
            ingress["batch"] = {"folder": str(directory / "batches")}
            ingress["api_key_file"] = str(directory / "keys.yaml")
            (directory / "keys.yaml").write_text(json.dumps({"keys": key_file()}))  # is YAML
        app = {
            "name": "corral",
            "route_prefix": "/",
            "import_path": "serve_app.app:build",
            "args": {"models": models, "ingress": ingress},
        }
        http = {"host": "127.0.0.1", "port": port}
        config = directory / "serve_config.yaml"
        config.write_text(json.dumps({"http_options": http, "applications": [app]}))
        if kind in (ALONE, SHARED):
            return ["sh", "-c", f'ulimit -n {N_FILES}; exec "$@"', "sh", *local_command(config)]
        return one_machine_command(config)

    def is_ready(url: str) -> bool:
        return all(answers(url, keys, model["id"]) for model in models)

    with running(command, is_ready) as server:
        assert server.directory is not None
        yield Setup(Target(server.url, None, server.directory), server.directory, keys)


def answers(url: str, keys: Mapping[str, str], model: str = DEMO) -> bool:
    """Whether an honest user gets a token there. Raises httpx.TransportError.

    The token has to match a grammar: the first one costs a model a second, and 20 to 40 MiB for its
    vocabulary, once, whoever asks.
    """
    headers = {"Authorization": f"Bearer {keys['alice']}"} if keys else {}
    body = {"model": model, "prompt": "Hello", "max_tokens": 1, "regex": "(.|\\n)*"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=10).is_success


def key_file() -> list[dict[str, Any]]:
    """The entries of the API keys. None says that it may do what only some should."""
    limits: dict[str, dict[str, Any]] = {name: {} for name in KEYS}
    limits |= {name: {"tokens_per_minute": METERED_TOKENS} for name in METERED}
    limits[LIMITED] = {"max_concurrent_requests": LIMITED_REQUESTS}
    limits[ELSEWHERE] = {"models": ["another-*"]}
    limits[SPENT] = {"tokens_per_day": 1}
    return [{"name": name, "key": KEYS[name]} | limits[name] for name in KEYS]


def _demo() -> dict[str, Any]:
    engine = {
        "n_slots": N_SLOTS,
        "n_ctx_slot": N_CTX_SLOT,
        "max_waiting": MAX_WAITING,
        "cache_ram_mib": 16,
        "threads": 1,
    }
    return _model(DEMO, {"builtin": True}, engine, num_cpus=1)


def in_turns(name: str) -> dict[str, Any]:
    """The small model, as large as the machine: nothing says how many threads it has."""
    engine = {"n_slots": N_SLOTS, "n_ctx_slot": N_CTX_SLOT, "max_waiting": MAX_WAITING}
    return {"id": name, "source": {"builtin": True}, "engine": engine | {"cache_ram_mib": 16}}


def _with_pre_tokenizer(name: str) -> dict[str, Any]:
    engine = {
        "n_slots": 1,
        "n_ctx_slot": N_CTX_SLOT,
        "cache_ram_mib": 0,
        "threads": 1,
        "kv_unified": False,
        "flash_attn": False,
    }
    return _model(name, {"path": str(regex_model(name))}, engine, num_cpus=0.2)


def _model(
    name: str, source: Mapping[str, Any], engine: dict[str, Any], num_cpus: float
) -> dict[str, Any]:
    options = {"ray_actor_options": {"num_cpus": num_cpus}, "num_replicas": 1}
    return {"id": name, "source": source, "engine": engine, "serve": options}


def regex_model(pre_tokenizer: str) -> Path:
    """A model of some MB with random weights whose file names this pre-tokenizer: written if it is not in
    ~/.cache/corral/hostile."""
    folder = Path.home() / ".cache/corral/hostile"
    target = folder / f"{pre_tokenizer}.gguf"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        plain = folder / "plain.gguf"
        writer = [sys.executable, "-m", "tools.random_models.model", str(plain)]
        subprocess.run([*writer, "--type", "q8_0"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        long_token = _PADDING[:2] + "x" * (_LONG - 4) + _PADDING[-2:]
        part = target.with_suffix(".part")
        part.write_bytes(patched(plain, {"qwen2": pre_tokenizer, _PADDING: long_token}))
        part.replace(target)
    return target


def patched(gguf: Path, texts: Mapping[str, str]) -> bytes:
    """The file with these texts of its metadata replaced, wherever they stand. Raises LookupError if one is
    not there."""
    reader = GGUFReader(gguf)
    last = reader.tensors[-1].field
    data = gguf.read_bytes()
    header = data[: last.offset + sum(part.nbytes for part in last.parts)]
    for old, new in texts.items():
        if _string(old) not in header:
            raise LookupError(f"{gguf} has no {old!r}")
        header = header.replace(_string(old), _string(new))
    return header + bytes(-len(header) % reader.alignment) + data[reader.data_offset :]


def _string(text: str) -> bytes:
    """As GGUF writes it."""
    return len(text.encode()).to_bytes(8, "little") + text.encode()
