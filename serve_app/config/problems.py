"""The faults of a configuration, in words: the field, why, and where it stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from inspect import isclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from serve_app.config.removed import REMOVED

Location = tuple[int | str, ...]
"""Names of fields and indices of list entries, from the outermost on, as pydantic has them."""
_ARGS: Location = ("applications", 0, "args")


def describe_errors(
    error: ValidationError,
    model: type[BaseModel] | None = None,
    whole: str = "",
    file: Path | None = None,
    within: Location = (),
) -> str:
    """Every wrong field and why, without its value, which may be secret. `whole` stands for no field.

    An unknown field comes with the right name, if `model` has one like it. `file` is the configuration
    file whose `args` were validated, or what is at `within` there: its lines are named.
    """
    root = None if file is None else _compose(file)
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        location, message = (*within, *filter(_is_named, problem["loc"])), problem["msg"]
        name = ".".join(map(str, location)) or whole
        if problem["type"] == "extra_forbidden":
            path = ".".join(part for part in location if isinstance(part, str))
            if path in REMOVED:
                name, message = f"{name} was removed", REMOVED[path]
            else:
                known = () if model is None else _names_at(model, location[len(within) :])
                message = f"there is no such field{did_you_mean(str(location[-1]), known)}"
        place = "" if root is None else f"{file}:{_line(root, (*_ARGS, *location))}: "
        lines.append(f"{place}{name}: {message}")
    return "; ".join(lines)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A question that names what is most like `name`; nothing if nothing is."""
    near = get_close_matches(name, names, n=1)
    return f", did you mean {near[0]}?" if near else ""


def _is_named(part: int | str) -> bool:
    """Whether a part of a location is not pydantic's own: the branch of a union has brackets."""
    return "[" not in str(part)


def _names_at(model: type[BaseModel], location: Location) -> Iterable[str]:
    """The fields that may stand where the location's last part does."""
    for part in location[:-1]:
        field = model.model_fields.get(str(part))
        if field is None:  # the index of a list entry, or a key of a mapping
            continue
        inner = next(models_in(field.annotation), None)
        if inner is None:
            return ()
        model = inner
    return model.model_fields


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def _compose(file: Path) -> yaml.Node | None:
    try:
        return yaml.compose(file.read_text(), yaml.SafeLoader)
    except (OSError, yaml.YAMLError):
        return None


def _line(node: yaml.Node, location: Location) -> int:
    """The line of a field, or of the innermost section around it that the file has."""
    line = node.start_mark.line
    for part in location:
        entries: Mapping[int | str, tuple[yaml.Node, yaml.Node]] = {}
        if isinstance(node, yaml.MappingNode):
            entries = {str(key.value): (key, value) for key, value in node.value}
        elif isinstance(node, yaml.SequenceNode):
            entries = {i: (value, value) for i, value in enumerate(node.value)}
        if part in entries:
            begin, node = entries[part]
            line = begin.start_mark.line
    return line + 1
