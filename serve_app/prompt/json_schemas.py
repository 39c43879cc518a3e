"""Makes JSON schemas that a grammar can hold: from any that a client sends, a schema for llguidance.

Unknown keywords and formats are annotations, as JSON Schema says. Keywords that no grammar here can hold
are dropped and named. An object has no other properties than its schema lists, unless the schema says so.

Source: JSON Schema, drafts 4 to 2020-12, and the chapter on JSON schemas of llguidance's documentation.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher

from serve_app.prompt import patterns

BLANKS = r" |\n{1,2}[ \t]{0,20}"
"""The blanks between the tokens of a JSON text, as in llama.cpp: without a bound, a model can go on with
blanks for ever."""
MAX_DEPTH = 100
"""The deepest nesting of lists and objects in a schema. llguidance takes 128."""
MAX_LITERAL_CHARS = 16_384
"""The longest text that is to be written as it stands. The engine takes 1.3 µs and 300 bytes for each
character."""
MAX_CHECKS = 300
"""The most parts of a schema that are compiled alone to find the part that cannot be."""
_MOST_INTEGER = 10**16 - 1
"""The largest integer where a schema has no bound of its own, with llama.cpp's 16 digits. Without a
bound, a model can go on with digits for ever. Other numbers have none: llguidance bounds none with
exponents."""
_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_DEFINITIONS = ("$defs", "definitions")
_UNHELD = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    )
)
"""The keywords of JSON Schema that constrain a text, and that llguidance cannot hold."""
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "not": (False,),
}
_DROPPED_FIRST = (
    *("pattern", "format", "multipleOf", "minLength", "maxLength", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems", "minProperties"),
    *("maxProperties", "additionalProperties", "patternProperties", "required", "type"),
    *("allOf", "oneOf", "anyOf", "const", "enum", "items", "prefixItems", "properties", "$ref"),
)
"""The order in which the keywords of a schema that cannot be held are tried without."""


class SchemaError(Exception):
    """A schema is none, or no text validates against it. The message has the path within the schema."""


@dataclass(frozen=True, slots=True)
class HeldSchema:
    """A schema that a grammar can hold."""

    schema: dict[str, Any]
    loosened: tuple[str, ...]
    """The paths of the keywords that are not held, as `properties.city.pattern`."""


def fit(schema: object, *, is_strict: bool) -> HeldSchema:
    """The schema as a grammar can hold it. A part that is no JSON schema, or that nothing validates
    against, raises SchemaError if `is_strict`, and allows everything otherwise."""
    fitter = _Fitter(is_strict, schema)
    fitted = fitter.fit(schema, "", closes=True)
    if fitted is False:
        fitter.fault("", "no text validates against it")
        fitted = {}
    repaired = fitter.repair({} if fitted is True else fitted)
    if reason := compile_error(repaired):
        fitter.fault("", sentence(reason))
        repaired = {}
    return HeldSchema(repaired, tuple(dict.fromkeys(fitter.loosened)))


def of_arguments(parameters: object) -> object:
    """The schema of a function's arguments: an object's, which is empty where none are described."""
    if not isinstance(parameters, dict):
        return {"type": "object", "additionalProperties": False}
    described = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "properties", "required")
    is_described = any(map(parameters.get, (*described, "additionalProperties")))
    closed = {} if is_described else {"additionalProperties": False}
    return {**closed, **parameters, "type": "object"}


def compile_error(schema: Mapping[str, Any]) -> str:
    """The reason why llguidance cannot compile the schema; empty if it can."""
    try:
        text = json.dumps(schema, allow_nan=False)
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=options())
    except ValueError as error:
        return str(error)
    message = LLMatcher.validate_grammar(grammar)
    return "" if message.startswith("WARNING") else message


def options() -> Any:
    """llguidance's options for every schema."""
    return {"whitespace_pattern": BLANKS, "lenient": True}


@dataclass
class _Fitter:
    is_strict: bool
    root: object
    loosened: list[str] = field(default_factory=list)
    open_definitions: set[str] = field(default_factory=set)
    """The definitions that are parts of an `allOf`: closed, they would exclude each other."""
    n_checks: int = 0

    def __post_init__(self) -> None:
        self._keywords: dict[str, Callable[[Any, str, bool], Any]] = {
            "type": self._type,
            "enum": self._enum,
            "const": self._literal,
            "pattern": self._pattern,
            "format": self._format,
            "required": self._required,
            "$ref": self._reference,
            "items": self._items,
            "additionalProperties": self._inner,
            "additionalItems": self._inner,
            "prefixItems": self._schemas,
            "allOf": self._schemas,
            "anyOf": self._schemas,
            "oneOf": self._schemas,
            "properties": self._named_schemas,
            "patternProperties": self._patterned_schemas,
            **dict.fromkeys(_DEFINITIONS, self._named_schemas),
            **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), self._count),
            **dict.fromkeys(("minProperties", "maxProperties"), self._count),
            **dict.fromkeys(("minimum", "maximum", "multipleOf"), self._number),
            **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), self._bound),
            **dict.fromkeys(("$anchor", "$id", "id", "$schema"), self._text),
        }
        self._open_what_is_combined(self.root)

    def fault(self, path: str, message: str) -> None:
        """A part of the schema is wrong. Raises SchemaError if the schema is strict."""
        if self.is_strict:
            raise SchemaError(f"{path or 'the schema'}: {message}")
        self.loosened.append(path)

    # -- fitting, keyword by keyword -----------------------------------------------------------------

    def fit(self, schema: object, path: str, *, closes: bool) -> Any:
        """A schema, or a boolean that is one. `closes`: whether objects have only their own properties."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self.fault(path, "is no JSON schema")
            return {}
        if path.count(".") >= MAX_DEPTH:
            self.fault(path, f"is nested deeper than {MAX_DEPTH} levels")
            return {}
        fitted: dict[str, Any] = {}
        for keyword, value in schema.items():
            place = _join_path(path, keyword)
            if keyword in _UNHELD:
                without_effect = (None, *_WITHOUT_EFFECT.get(keyword, ()))
                if value not in without_effect and not _closes_itself(schema, keyword):
                    self.loosened.append(place)
            elif keyword in self._keywords and (value is not None or keyword == "const"):
                made = self._keywords[keyword](value, place, closes and not _combines(schema))
                if made is not None or value is None:  # which a constant may be
                    fitted[keyword] = made
        _take_null(schema, fitted)
        _bound_digits(fitted)
        self._close(schema, fitted, closes)
        return fitted

    def _close(self, schema: dict[str, Any], fitted: dict[str, Any], closes: bool) -> None:
        """Let the object have its own properties only, where its schema leaves that open."""
        properties = fitted.get("properties")
        if _closes_itself(schema, "unevaluatedProperties"):
            fitted.setdefault("additionalProperties", False)
        if properties is None or _combines(schema):
            return
        if not fitted.keys() & {"type", "enum", "const"}:
            fitted["type"] = "object"
        if closes and not fitted.keys() & {"additionalProperties", "patternProperties"}:
            for name in fitted.get("required", ()):
                properties.setdefault(name, {})
            if properties:
                fitted["additionalProperties"] = False

    def _type(self, value: Any, path: str, _: bool) -> Any:
        names = value if isinstance(value, list) else [value]
        known = [name.lower() for name in names if isinstance(name, str) and name.lower() in _TYPES]
        if len(known) < len(names) or not names:
            self.fault(path, f"{_excerpt(value)} is no type of JSON")
            return None
        return known if isinstance(value, list) else known[0]

    def _enum(self, value: Any, path: str, _: bool) -> Any:
        if not isinstance(value, list) or not value:
            self.fault(path, "is no list of values")
            return None
        literals = [self._literal(one, path, False) for one in value]
        return literals if literals == value else None

    def _literal(self, value: Any, path: str, _: bool) -> Any:
        if _is_plain(value):
            return value
        self.fault(path, f"has a number out of range, or more than {MAX_LITERAL_CHARS} characters")
        return None

    def _text(self, value: Any, path: str, _: bool) -> Any:
        if isinstance(value, str) and len(value) <= MAX_LITERAL_CHARS:
            return value
        self.fault(path, f"is no text, or has more than {MAX_LITERAL_CHARS} characters")
        return None

    def _pattern(self, value: Any, path: str, _: bool) -> Any:
        text = self._text(value, path, False)
        try:
            return None if text is None else patterns.to_rust(text)
        except ValueError as error:
            self.fault(path, str(error))
            return None

    def _format(self, value: Any, path: str, _: bool) -> Any:
        return value if isinstance(value, str) and value in _FORMATS else None

    def _required(self, value: Any, path: str, _: bool) -> Any:
        if isinstance(value, bool):  # as drafts before the fourth have it, at a property
            return None
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return list(dict.fromkeys(value))
        self.fault(path, "is no list of names")
        return None

    def _reference(self, value: Any, path: str, _: bool) -> Any:
        if isinstance(value, str) and self._has(value):
            return value
        self.fault(path, f"there is no {_excerpt(value)}")
        return None

    def _has(self, reference: str) -> bool:
        """Whether llguidance can find the schema: elsewhere in the same text, or by a name given there."""
        if not reference.startswith("#/"):
            return reference == "#" or not compile_error({**self._named_parts, "$ref": reference})
        place: Any = self.root
        for part in unquote(reference[2:]).split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
                place = place[int(key)]
            elif isinstance(place, dict) and key in place:
                place = place[key]
            else:
                return False
        return isinstance(place, dict | bool)

    def _items(self, value: Any, path: str, closes: bool) -> Any:
        if isinstance(value, list):
            return self._schemas(value, path, closes)
        return self._inner(value, path, closes)

    def _inner(self, value: Any, path: str, closes: bool) -> Any:
        # Only the properties next to it may combine: below, objects are whole again.
        return self.fit(value, path, closes=True)

    def _schemas(self, value: Any, path: str, closes: bool) -> Any:
        if not isinstance(value, list) or not value:
            if value != []:
                self.fault(path, "is no list of schemas")
            return None
        combines = path.endswith("allOf") and len(value) > 1
        return [
            self.fit(one, f"{path}.{i}", closes=closes and not combines)
            for i, one in enumerate(value)
        ]

    def _named_schemas(self, value: Any, path: str, closes: bool) -> Any:
        if not isinstance(value, dict):
            if value != []:  # an empty map, as PHP writes it
                self.fault(path, "is no object of schemas")
            return None
        schemas = {}
        for name, schema in value.items():
            place = _join_path(path, name)
            if len(name) > MAX_LITERAL_CHARS:
                self.fault(place[:64], f"has more than {MAX_LITERAL_CHARS} characters")
            elif schema is not None:
                schemas[name] = self.fit(schema, place, closes=place not in self.open_definitions)
        return schemas

    def _patterned_schemas(self, value: Any, path: str, closes: bool) -> Any:
        named = self._named_schemas(value, path, closes)
        if named is None:
            return None
        held = {self._pattern(name, _join_path(path, name), False): named[name] for name in named}
        return {pattern: schema for pattern, schema in held.items() if pattern is not None}

    def _count(self, value: Any, path: str, _: bool) -> Any:
        is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if is_whole and math.isfinite(value) and value == int(value):
            return int(value)
        self.fault(path, "is no whole number of 0 or more")
        return None

    def _number(self, value: Any, path: str, _: bool) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool) and _is_plain(value):
            return value
        self.fault(path, "is no number")
        return None

    def _bound(self, value: Any, path: str, _: bool) -> Any:
        return value if isinstance(value, bool) else self._number(value, path, False)

    @property
    def _named_parts(self) -> dict[str, Any]:
        root = self.root if isinstance(self.root, dict) else {}
        keys = (*_DEFINITIONS, "$id", "id", "$schema")
        return {key: root[key] for key in keys if key in root}

    def _open_what_is_combined(self, root: object) -> None:
        """Find the definitions that an `allOf`, or properties beside a `$ref`, combine with others."""
        level = [root]
        for _ in range(MAX_DEPTH):
            maps = [value for value in level if isinstance(value, dict)]
            for schema in filter(_combines, maps):
                parts = schema.get("allOf")
                for part in [schema, *(parts if isinstance(parts, list) else ())]:
                    reference = part.get("$ref") if isinstance(part, dict) else None
                    if isinstance(reference, str):
                        self.open_definitions.add(reference.removeprefix("#/").replace("/", "."))
            lists = [value for value in level if isinstance(value, list)]
            level = [value for one in maps for value in one.values()]
            level += [value for one in lists for value in one]

    # -- what fits, and still cannot be compiled -------------------------------------------------------

    def repair(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema without the keywords that llguidance refuses. Raises SchemaError if it is strict, and
        what is refused is no part of JSON Schema that llguidance merely lacks."""
        if not compile_error(schema):
            return schema
        definitions = {key: dict(schema[key]) for key in _DEFINITIONS if key in schema}
        for key, named in definitions.items():
            for name in named:
                named[name] = self._repair(named[name], f"{key}.{name}", definitions)
        body = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
        return {**self._repair(body, "", definitions), **definitions}

    def _repair(self, schema: Any, path: str, definitions: Mapping[str, Any]) -> Any:
        reason = self._reason(schema, definitions)
        if not reason or not isinstance(schema, dict):
            return schema
        repaired = {
            key: self._repair_inner(key, value, _join_path(path, key), definitions)
            for key, value in schema.items()
        }
        reason = self._reason(repaired, definitions)
        if not reason:
            return repaired
        for key in (key for key in _DROPPED_FIRST if key in repaired):
            rest = {name: value for name, value in repaired.items() if name != key}
            if not self._reason(rest, definitions):
                self._drop(_join_path(path, key), reason)
                return rest
        self._drop(path, reason)
        return {}

    def _repair_inner(self, key: str, value: Any, path: str, definitions: Mapping[str, Any]) -> Any:
        if key in ("properties", "patternProperties"):
            return {
                name: self._repair(inner, _join_path(path, name), definitions)
                for name, inner in value.items()
            }
        if key in ("allOf", "anyOf", "oneOf", "prefixItems", "items") and isinstance(value, list):
            return [
                self._repair(inner, f"{path}.{i}", definitions) for i, inner in enumerate(value)
            ]
        if key in ("items", "additionalProperties", "additionalItems"):
            return self._repair(value, path, definitions)
        return value

    def _reason(self, schema: Any, definitions: Mapping[str, Any]) -> str:
        """Why the schema cannot be compiled alone; empty if it can."""
        if schema is False:
            return ""
        self.n_checks += 1
        if self.n_checks > MAX_CHECKS:
            return "" if schema in (True, {}) else "not supported: too many parts"
        return compile_error({**_alone(schema), **definitions} if schema is not True else {})

    def _drop(self, path: str, reason: str) -> None:
        if re.search("[Uu]nsupported|not supported|Failed to generate", reason):
            self.loosened.append(path)
        else:
            self.fault(path, sentence(reason))


def _combines(schema: Mapping[str, Any]) -> bool:
    parts = schema.get("allOf")
    n_parts = len(parts) if isinstance(parts, list) else 0
    others = sum(key in schema for key in ("properties", "$ref", "anyOf", "oneOf"))
    return n_parts > 1 or (n_parts == 1 and others > 0) or others > 1


def _closes_itself(schema: Mapping[str, Any], keyword: str) -> bool:
    """Whether `unevaluatedProperties` means what `additionalProperties` does."""
    combined = ("allOf", "anyOf", "oneOf", "$ref")
    is_simple = not any(key in schema for key in combined)
    return keyword == "unevaluatedProperties" and schema.get(keyword) is False and is_simple


def _bound_digits(fitted: dict[str, Any]) -> None:
    """Bound an integer that its schema leaves open, also where other types may be in its place."""
    kinds = fitted.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" not in kinds or "number" in kinds or fitted.keys() & {"enum", "const"}:
        return
    least = max(fitted.get(name, -_MOST_INTEGER) for name in ("minimum", "exclusiveMinimum"))
    most = min(fitted.get(name, _MOST_INTEGER) for name in ("maximum", "exclusiveMaximum"))
    if -_MOST_INTEGER <= least <= most <= _MOST_INTEGER:
        fitted.setdefault("minimum", -_MOST_INTEGER)
        fitted.setdefault("maximum", _MOST_INTEGER)


def _take_null(schema: Mapping[str, Any], fitted: dict[str, Any]) -> None:
    """OpenAPI's `nullable`."""
    if schema.get("nullable") is not True:
        return
    kind = fitted.get("type")
    if isinstance(kind, str):
        fitted["type"] = [kind, "null"]
    if isinstance(values := fitted.get("enum"), list) and None not in values:
        fitted["enum"] = [*values, None]


def _alone(schema: Any) -> Any:
    """The schema with no reference but to definitions."""
    if isinstance(schema, list):
        return [_alone(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    definitions = tuple(f"#/{key}/" for key in _DEFINITIONS)
    is_outside = isinstance(reference, str) and not reference.startswith(definitions)
    return {
        key: _alone(value) for key, value in schema.items() if not (is_outside and key == "$ref")
    }


def _is_plain(value: object) -> bool:
    """Whether the value can be written as it stands: its numbers are doubles, its texts not too long."""
    return all(map(_is_plain_scalar, _scalars(value)))


def _is_plain_scalar(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_LITERAL_CHARS
    try:
        return not isinstance(value, int | float) or math.isfinite(float(value))
    except OverflowError:
        return False


def _scalars(value: object) -> Iterator[object]:
    values = [value]
    while values:
        match values.pop():
            case dict(fields):
                values += [*fields, *fields.values()]
            case list(items):
                values += items
            case scalar:
                yield scalar


def _join_path(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _excerpt(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)[:64]


def sentence(reason: str) -> str:
    """The line of llguidance's message that says what is wrong, without the lines that it quotes."""
    lines = [line for line in reason.strip().splitlines() if line and not line.startswith(" ")]
    line = next((line for line in lines if line.startswith("error: ")), (lines or [""])[0])
    line = _PLACE.sub("", line).removeprefix("failed to compile JSON schema: ")
    return line.removeprefix("error: ").removeprefix("Unsatisfiable schema: ") or "it is not valid"


_PLACE = re.compile(r"^(?:at )?[0-9]+\([0-9]+\): ")
