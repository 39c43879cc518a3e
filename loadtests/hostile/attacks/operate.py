"""An operator's actions and views, tried with an ordinary key."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from loadtests.hostile.attack import Attack
from loadtests.hostile.scene import Answer, Scene
from loadtests.hostile.setups import DEMO, ELSEWHERE, HONEST, KEYS, N_SLOTS, SPENT

PATHS = ("a.slot", "../a.slot", "/etc/a.slot", "a/../../b", "..", ".", "a\x00b", "a" * 5000)
CANARY = "xyzzy quux plugh"
"""A part of another key's prompt."""
CANARY_ID = "canary-of-alice"
LIVE_S = 2.5


def _slot_files(scene: Scene) -> None:
    for action in ("save", "restore", "erase"):
        for slot in range(N_SLOTS):
            body: dict[str, Any] = {} if action == "erase" else {"filename": f"mallory-{slot}"}
            answer = scene.post(f"/slots/{slot}?action={action}", body)
            if answer.status == 200:
                scene.found(f"an ordinary key may {action} a slot")


def _slot_paths(scene: Scene) -> None:
    for path in PATHS:
        for action in ("save", "restore"):
            answer = scene.post(f"/slots/0?action={action}", {"filename": path})
            if answer.status in (200, 500):
                scene.found(f"{action} as {path[:20]!r} gets {answer.status}")


def _adapters(scene: Scene) -> None:
    answer = scene.post("/lora-adapters", b'[{"id": 0, "scale": 1.0}]')
    if answer.status == 200:
        scene.found("an ordinary key may set adapters")


def _looking(scene: Scene) -> None:
    """Another key's prompt, and then every page that might show it, or who asked."""
    prompt = f"{CANARY} " * 20
    body = {"prompt": prompt, "max_tokens": 64}
    scene.post("/v1/completions", body, "alice", **{"x-request-id": CANARY_ID})
    for path in ("/slots", "/v1/stats", "/props", "/metrics", "/v1/models"):
        _look(scene, path, scene.get(path).body)
    _look(scene, "/v1/live", live(scene))
    told = scene.get(f"/v1/requests/{CANARY_ID}")
    if told.status == 200:
        scene.found("an ordinary key may see another's /v1/requests/{id}")
    slots = scene.get("/slots").json()
    if isinstance(slots, list) and any(_tells_tokens(slot) for slot in slots):
        scene.found("/slots tells an ordinary key what others are asking")


def _tells_tokens(slot: Any) -> bool:
    return isinstance(slot, dict) and any(
        slot.get(name) for name in ("prompt", "id_task", "params")
    )


def _look(scene: Scene, path: str, body: bytes) -> None:
    names = [name for name in ("alice", *HONEST) if json.dumps(name).encode() in body]
    if CANARY.encode() in body or CANARY_ID.encode() in body:
        scene.found(f"{path} shows another key's request")
    if names:
        scene.found(f"{path} names other keys: {names[0]}")
    if any(secret.encode() in body for secret in KEYS.values()):
        scene.found(f"{path} shows a secret")


def live(scene: Scene) -> bytes:
    """The first seconds of /v1/live."""
    until, got = time.monotonic() + LIVE_S, b""
    try:
        with scene.opened("GET", "/v1/live", None, "mallory", {}) as response:
            scene.count(response.status)
            while time.monotonic() < until and (part := response.read1(65536)):
                got += part
    except OSError:
        pass
    return got


_CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
_NAMING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": _CHAT,
    "/v1/chat/completions/input_tokens": _CHAT,
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": _CHAT,
    "/v1/messages/count_tokens": _CHAT,
    "/api/chat": _CHAT,
    "/api/generate": {},
    "/api/show": {},
    "/api/embed": {"input": []},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": _CHAT,
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
}
_ASKED = ("/props", "/slots", "/metrics", "/lora-adapters")
_LISTS = ("/v1/models", "/api/tags", "/api/ps", "/v1/stats")
LEAST_WAIT_S = 60
FORBIDDEN, TOO_MANY = 403, 429


def _other_models(scene: Scene) -> None:
    """A key asks for a model that it may not use, and for one that nobody has."""
    for name in (DEMO, f"{DEMO.upper()}:latest", None, "nobody-has-this"):
        named = {} if name is None else {"model": name}
        query = "" if name is None else f"?model={name}"
        asking = [
            *(
                (path, partial(scene.post, path, _NAMING[path] | named, ELSEWHERE))
                for path in _NAMING
            ),
            *((path, partial(scene.get, path + query, ELSEWHERE)) for path in _ASKED),
        ]
        for path, ask in asking:
            answer = _own_answer(scene, ask)
            if answer.status != FORBIDDEN and scene.left_s():
                scene.found(f"{path} answers {answer.status} for another key's model")
    for path in _LISTS:
        answer = _own_answer(scene, partial(scene.get, path, ELSEWHERE))
        if answer.status != 200 and scene.left_s():
            scene.found(f"{path} answers {answer.status}: this shows nothing")
        if DEMO.encode() in answer.body:
            scene.found(f"{path} lists a model that the key may not use")
    if not scene.left_s():
        scene.found("not all was asked in time: this shows nothing")


def _own_answer(scene: Scene, ask: Callable[[], Answer]) -> Answer:
    """The ingress's answer. HAProxy lets a key ask so many times a second only."""
    answer = ask()
    while answer.status == TOO_MANY and scene.left_s():
        scene.sleep(1.0)
        answer = ask()
    return answer


def _long_waits(scene: Scene) -> None:
    """A key whose budget of the day is used up: its client must not sleep until tomorrow."""
    for _ in range(3):
        answer = scene.post("/v1/completions", {"prompt": "a b c", "max_tokens": 4}, SPENT)
    headers = {name.lower(): value for name, value in answer.headers.items()}
    if answer.status != TOO_MANY:
        scene.found(f"a used-up budget gets {answer.status}: this shows nothing")
    is_long = int(headers.get("retry-after", 0)) > LEAST_WAIT_S
    if is_long is not (headers.get("x-should-retry") == "false"):
        scene.found("a client is told to sleep for hours")


_ADMIN = "Only a key whose entry says so may: 401 or 403 for all others."
ATTACKS = (
    Attack(
        name="slot files",
        family="operate",
        what="An ordinary key saves, restores and erases all slots.",
        expects=_ADMIN,
        act=_slot_files,
        is_short=True,
    ),
    Attack(
        name="slot paths",
        family="operate",
        what="Names of slot files that lead elsewhere.",
        expects="Refused.",
        act=_slot_paths,
    ),
    Attack(
        name="adapters",
        family="operate",
        what="An ordinary key sets adapters.",
        expects=_ADMIN,
        act=_adapters,
    ),
    Attack(
        name="others' requests",
        family="operate",
        what="An ordinary key looks for what others ask, and who they are.",
        expects="It sees its own only.",
        act=_looking,
    ),
    Attack(
        name="other models",
        family="operate",
        what="A key that may use other models names this one, in every protocol, or none.",
        expects="403, the same as for a model that nobody has, and no list names it.",
        act=_other_models,
        seconds=40.0,
        least_s=30.0,
        is_short=True,
    ),
    Attack(
        name="long waits",
        family="operate",
        what="A key whose budget of the day is used up asks again.",
        expects="429 with `x-should-retry: false`, so that no client sleeps until tomorrow.",
        act=_long_waits,
    ),
)
