"""The table of sampling parameters in the documents, from their declarations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from annotated_types import Interval

from serve_app.base.sampling import PARAMETERS, Api, Bounds, Parameter

_PATHS = {Api.RESPONSES: "/v1/responses", Api.ANTHROPIC: "/v1/messages"}
_HEAD = "| parameter | default | values | also in | what |\n| --- | --- | --- | --- | --- |\n"
# Bounds from here on are those of the numbers' types, and of no interest to readers.
_HUGE = 2**31 - 1


def table() -> str:
    """A row for each declared parameter, in Markdown."""
    return _HEAD + "".join(
        f"| `{one.name}` | {_default(one)} | {_range(one.apis[Api.OPENAI].bounds)} | "
        f"{'; '.join(_elsewhere(one))} | {one.meaning} |\n"
        for one in PARAMETERS
    )


def rewritten(text: str) -> str:
    """The document with its table as it is now. Raises ValueError if it has none."""
    found, n = re.subn(re.escape(_HEAD) + r"(?:\|.*\n)*", lambda _: table(), text)
    if n != 1:
        raise ValueError(f"The table's head is there {n} times, and should be once.")
    return found


def _default(parameter: Parameter) -> str:
    return json.dumps(parameter.default) if parameter.default not in (None, ()) else ""


def _range(bounds: Bounds | None) -> str:
    if bounds is None:
        return ""
    if not isinstance(bounds, Interval):
        return f"up to {bounds.max_length}"
    limits = {"from": bounds.ge, "above": bounds.gt, "to": bounds.le, "below": bounds.lt}
    return " ".join(
        f"{word} {limit}"
        for word, limit in limits.items()
        if isinstance(limit, int | float) and abs(limit) < _HUGE
    )


def _elsewhere(parameter: Parameter) -> Iterator[str]:
    for api, path in _PATHS.items():
        if api not in parameter.apis:
            continue
        taken = parameter.apis[api]
        words = [f"as `{taken.name}`"] if taken.name else []
        if taken.bounds != parameter.apis[Api.OPENAI].bounds:
            words.append(_range(taken.bounds))
        yield " ".join([f"`{path}`", *words])
