"""The requests that the API's description shows are answered by the built-in model."""

from __future__ import annotations

from tests.e2e.conftest import Corral

NOT_ITS = {
    "/infill": "no tokens for infill",
    "rerank": "cannot rank",
    "score": "cannot rank",
    "classify": "cannot classify",
}
"""What the built-in model cannot do."""


def test_every_example(corral: Corral) -> None:
    paths = corral.http.get("/openapi.json").json()["paths"]
    operations = {path: item["post"] for path, item in paths.items() if "post" in item}
    posts = {path: one for path, one in operations.items() if "requestBody" in one}
    for path, operation in posts.items():
        (content,) = operation["requestBody"]["content"].values()
        if "examples" not in content:  # slots and adapters
            continue
        example = content["examples"]["example"]["value"]
        answer = corral.http.post(path, json=example | {"model": "demo"})
        lacking = [said for name, said in NOT_ITS.items() if name in path]
        if lacking:
            assert (answer.status_code, lacking[0] in answer.text) == (501, True)
        else:
            assert answer.status_code == 200, f"{path}: {answer.text}"
