"""An operator's actions and views, tried with an ordinary key."""

from __future__ import annotations

import json
import time
from typing import Any

from loadtests.hostile.attack import Attack
from loadtests.hostile.scene import Scene
from loadtests.hostile.setups import HONEST, KEYS, N_SLOTS

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
)
