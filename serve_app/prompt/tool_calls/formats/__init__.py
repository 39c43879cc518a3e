"""The formats of tool calls, a module for each, or for some that are alike; all are collected here.

A module declares its `FORMAT`, or its `FORMATS`.
"""

from __future__ import annotations

import importlib
import pkgutil
import re

from serve_app.prompt.tool_calls.format import ToolFormat


def _collected() -> tuple[ToolFormat, ...]:
    names = [module.name for module in pkgutil.iter_modules(__path__, f"{__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    formats: list[ToolFormat] = [one.FORMAT for one in modules if hasattr(one, "FORMAT")]
    formats += [form for one in modules for form in getattr(one, "FORMATS", ())]
    return tuple(sorted(formats, key=lambda one: (-len(one.template_patterns), one.name)))


FORMATS = _collected()
"""All there are. Those that ask more of a template are before those that ask less."""


def detect(template: str) -> ToolFormat | None:
    """The format that a chat template asks for; None if it is none of these."""
    return next(
        (
            one
            for one in FORMATS
            if all(re.search(pattern, template) for pattern in one.template_patterns)
        ),
        None,
    )
