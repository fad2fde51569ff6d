"""Configuration: typed, frozen, strict, and rejected as a whole with one readable error.

    YAML file --load_yaml--> dict --build--> Config --dump_yaml--> YAML text
                    overrides --apply_overrides--^

A `Config` lives next to what it configures, and each field says what it means:

    class OptimizerConfig(Config):
        learning_rate: float = Field(1e-3, gt=0, description="peak learning rate of AdamW")
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args

import pydantic
import pydantic_core
import yaml
from pydantic.fields import FieldInfo

from treadle.core.errors import ConfigError
from treadle.core.text import DEEPEST, escape_text, json_problem

C = TypeVar("C", bound="Config")
Location = tuple[int | str, ...]


class Config(pydantic.BaseModel):
    """Base of every configuration: immutable, no unknown keys, no coercion ("yes" is no int, true is no 1).

    Describe fields with `Field(description=...)` or a docstring below the field. Build one from plain data
    with `build`, which also takes YAML lists for tuples and strings for enums and paths.

    aliases: name of a setting in other libraries -> ends of its paths here, likeliest first, or a remark in
    parentheses; for error messages.
    """

    aliases: ClassVar[Mapping[str, str]] = {}

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, use_attribute_docstrings=True
    )


REQUIRED: Any = pydantic_core.PydanticUndefined
"""Default of a field without a default."""


class FieldLine(NamedTuple):
    """One leaf of a configuration: `FieldLine("training.learning_rate", 5e-4, False, "peak ...", 1e-6)`."""

    path: str
    value: Any
    is_default: bool
    help: str
    default: Any


# YAML


_MOST_CHARACTERS = 10_000_000  # limit per file or command-line value, with aliases expanded


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars instead of 1.1's: 5e-4 is a float; yes, on, 1:30 and 2024-01-01 are strings.

    Refuses more than `DEEPEST` levels and more than `_MOST_CHARACTERS`: a few lines of aliases can expand to gigabytes.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's own declaration

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._open = 0  # depth of the node being composed
        self._extents: dict[yaml.Node, tuple[int, int]] = {}  # characters, levels

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if self._open > DEEPEST:
            raise self._refusal(f"nested deeper than {DEEPEST} levels", event.start_mark)
        self._open += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._open -= 1
        if isinstance(event, yaml.AliasEvent) and node not in self._extents:
            raise self._refusal(f"{event.anchor!r} refers to itself", event.start_mark)
        if node is not None and node not in self._extents:
            self._extents[node] = self._extent(node)
        return node

    @staticmethod
    def _refusal(why: str, mark: Any) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(None, None, why, mark)

    def _extent(self, node: yaml.Node) -> tuple[int, int]:
        """Return the characters and levels of a node. Raises MarkedYAMLError for too many."""
        if isinstance(node, yaml.ScalarNode):
            problem, characters, levels = json_problem(node.value), 1 + len(node.value), 0
        else:
            nodes = node.value if isinstance(node, yaml.SequenceNode) else chain.from_iterable(node.value)
            extents = [self._extents[each] for each in nodes]
            problem, characters = None, 1 + sum(each for each, _ in extents)
            levels = 1 + max((each for _, each in extents), default=0)
        why = str(problem or "")
        if levels > DEEPEST:
            why = f"nested deeper than {DEEPEST} levels"
        elif characters > _MOST_CHARACTERS:
            why = f"more than {_MOST_CHARACTERS:,} characters with aliases expanded; keep data in a separate file"
        if why:
            raise self._refusal(why, node.start_mark)
        return characters, levels


class _Dumper(yaml.SafeDumper):
    """Quotes whatever either YAML 1.1 or `_Loader` would read as something other than a string."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F_]{1,64}", list("-+0123456789")),
    (
        "float",
        r"[-+]?([0-9][0-9_]*(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+|[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+)"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)
for _name, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _first)


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, Any]:
    """Build a mapping with unique string keys. PyYAML alone would silently keep the last of two equal keys."""
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            problem = f"key {key!r} is not a string; quote it"
        elif key in result:
            problem = f"key {key!r} appears twice"
        else:
            result[key] = loader.construct_object(value_node, deep=True)
            continue
        raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
    return result


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def _parse(text: str, source: str, advice: str = "") -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark and not advice else source
        raise ConfigError(f"{place}: {error.problem or error.context}{advice}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: {error}{advice}") from None


def load_yaml(path: Path | str) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigError naming file and line."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    return parse_yaml(content, str(path))


def parse_yaml(content: bytes, source: str) -> dict[str, Any]:
    """Return the mapping in YAML text. source: file name for error messages. Raises ConfigError."""
    try:
        data = _parse(content.decode(), source)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not UTF-8 text ({error})") from error
    if not isinstance(data, dict):
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{source}: expected a mapping of keys to values, found {kind}")
    return data


def dump_yaml(config: Config) -> str:
    """Return YAML text, fields in order of declaration; `build(type(config), ...)` restores an equal config."""
    data = config.model_dump(mode="json")
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    # Unicode line breaks, which PyYAML would write unescaped.
    if escape_text(text) != text:
        text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=False)
    return text


# Merging and overrides


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings at every depth. Where they differ, `above` wins; a null in it removes the key.

    `merge({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 4}, "b": None})` is `{"a": {"x": 1, "y": 4}}`.
    """
    result = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), Mapping):
            result[key] = merge(below[key], value)
        elif value is None and key in below:
            del result[key]
        else:
            result[key] = value
    return result


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `data` with each `key.path=value` applied in order.

    Values are YAML: `training.learning_rate=5e-4`, `name="7"`, `stop=[a, b]`; nothing or `null` is None.
    Missing or null parents become mappings. Raises ConfigError for a malformed override or a plain value as a parent.
    """
    result = dict(data)
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"override {override!r:.200} must look like key.path=value")
        if len(keys) > DEEPEST:
            raise ConfigError(f"override {override!r:.200} has more than {DEEPEST} keys")
        value = _parse(text, f"override {override!r:.200}", "; quote the value if it is a string")
        result = _with(result, keys, value, override, depth=0)
    return result


def as_override(value: Any) -> str:
    """Format the value as in an override: `null`, `true`, `tree`, `[a, b]`, `{key: 1}`."""
    if isinstance(value, Config):
        value = value.model_dump(mode="json")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(as_override, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_override(item)}" for key, item in value.items()) + "}"
    return str(value) or '""'


def _with(node: Mapping[str, Any], keys: Sequence[str], value: Any, override: str, depth: int) -> dict[str, Any]:
    key = keys[depth]
    if depth == len(keys) - 1:
        return {**node, key: value}
    child = node.get(key)
    if not isinstance(child, Mapping | None):
        parent = ".".join(keys[: depth + 1])
        raise ConfigError(f"override {override!r}: {parent!r} is {_short(child)}, which has no keys")
    return {**node, key: _with(child or {}, keys, value, override, depth + 1)}


# Validation

_EMPTY: tuple[Any, ...] = ("", (), {})


def build(cls: type[C], data: Mapping[str, Any], source: str = "", overrides: Sequence[str] = ()) -> C:
    """Return a validated `cls` from `data` with `overrides` applied (`apply_overrides`).

    Raises ConfigError with one line per problem: origin, full path of the key, value, expectation. The origin is the
    override that touches the key, or `source` (such as a file name) if the problem exists without overrides.
    """
    data = _without_nulls(cls, data)
    changed = _without_nulls(cls, apply_overrides(data, overrides))
    try:
        # pydantic's strict rules for JSON suit YAML: lists become tuples, strings become enums.
        plain = pydantic_core.to_json(changed)
    except ValueError as error:
        raise ConfigError(f"{source}: not plain data: {error}" if source else f"not plain data: {error}") from error
    try:
        return cls.model_validate_json(plain)
    except pydantic.ValidationError:
        before, lines = _problems(cls, data) if overrides else [], []
        for problem in _problems(cls, changed):
            touching = [o for o in overrides if problem not in before and overlap(problem.path, _key(o))]
            origin = " ".join(_short(o, quote=False) for o in touching) or source
            path = problem.path if problem.named and _key(origin) != problem.path else ""
            lines.append(": ".join(part for part in (origin, path, problem.text) if part))
        # The lines contain everything in pydantic's own text.
        raise ConfigError("\n".join(lines)) from None


def _without_nulls(cls: type[Config] | None, data: Any) -> Any:
    """Drop nulls at keys that are empty by default (`environment=null`)."""
    if isinstance(data, list | tuple):
        return [_without_nulls(cls, each) for each in data]
    if cls is None or not isinstance(data, Mapping):
        return data
    kept = {}
    for name, value in data.items():
        field = cls.model_fields.get(name)
        if value is not None or field is None or field.get_default(call_default_factory=True) not in _EMPTY:
            kept[name] = _without_nulls(nested_config(field.annotation) if field else None, value)
    return kept


class _Problem(NamedTuple):
    """A problem at a path ("" for the whole). named: whether the path has to precede the text."""

    path: str
    text: str
    named: bool


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def overlap(path: str, other: str) -> bool:
    """Return whether two paths are equal or one contains the other; "" contains every path."""
    return not path or f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _problems(cls: type[Config], data: Mapping[str, Any]) -> list[_Problem]:
    """Return one problem per key; refusals by several members of a union are joined by "or"."""
    plain = pydantic_core.to_json(data)
    try:
        cls.model_validate_json(plain)
        return []
    except pydantic.ValidationError as error:
        details = error.errors(include_url=False)
    problems: list[_Problem] = []
    refused: dict[str, tuple[str, list[str]]] = {}
    for detail in details:
        keys = _keys(cls, pydantic_core.from_json(plain), detail["loc"])
        path = ".".join(map(str, keys))
        match detail["type"]:
            case "extra_forbidden":
                problems.append(_Problem(path, _unknown_key(cls, keys), named=False))
            case "missing":
                field = _fields_at(cls, keys[:-1]).get(str(keys[-1]))
                purpose = f": {field.description}" if field is not None and field.description else ""
                problems.append(_Problem(path, f"missing key {path!r}{purpose}", named=False))
            case "value_error":
                # Raised by a validator, whose message names the value.
                refused.setdefault(path, ("", []))[1].append(str(detail["ctx"]["error"]))
            case kind:
                expected = detail["msg"].removeprefix("Input should be ") + " (quote it)" * (kind == "string_type")
                refused.setdefault(path, (f"got {_short(detail['input'])}, expected ", []))[1].append(expected)
    for path, (got, expectations) in refused.items():
        problems.append(_Problem(path, f"{got}{' or '.join(dict.fromkeys(expectations))}", named=True))
    return list(dict.fromkeys(problems))


def _keys(cls: type[Config], data: Any, location: Location) -> Location:
    """Return the location without the names of union members that pydantic inserts."""
    keys: list[int | str] = []
    for part in location:
        if isinstance(data, dict | list) and (part in data or isinstance(part, int)):
            data = data[part]  # type: ignore[index]  # dict by key, list by index
        elif part in _fields_at(cls, keys):
            # A missing key or an invalid default.
            data = None
        else:
            continue
        keys.append(part)
    return tuple(keys)


def _alias_paths(cls: type[Config], name: str) -> list[str]:
    """Return the paths of keys, or of options in a key, that match another library's setting."""
    found = []
    for end in cls.aliases.get(name, "").split(", "):
        section, _, option = end.rpartition(".")
        for path in paths(cls):
            if f".{path}".endswith(f".{end}"):
                found.append(path)
            elif section.endswith("_options") and f".{path}".endswith(f".{section}"):
                found.append(f"{path}.{option}")
    return found


def _short(value: Any, limit: int = 80, quote: bool = True) -> str:
    text = repr(value) if quote else str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _unknown_key(cls: type[Config], keys: Location) -> str:
    *parents, leaf = map(str, keys)
    siblings = list(_fields_at(cls, keys[:-1]))
    if (remark := cls.aliases.get(leaf, "")).startswith("("):
        return f"unknown key {'.'.join([*parents, leaf])!r} {remark}"
    if meant := _alias_paths(cls, leaf):
        meant = [path for path in meant if path.rpartition(".")[0] == ".".join(parents)] or meant
        return f"unknown key {'.'.join([*parents, leaf])!r}; did you mean {' or '.join(map(repr, meant))}?"
    meant = [path for path in paths(cls) if path.rpartition(".")[2] == leaf]
    if not meant:
        near = difflib.get_close_matches(leaf, siblings, n=1) or [name for name in siblings if leaf in name.split("_")]
        meant = [".".join([*parents, name]) for name in near[:1]]
    hint = f"did you mean {' or '.join(map(repr, meant))}?" if meant else f"known here: {', '.join(siblings)}"
    return f"unknown key {'.'.join([*parents, leaf])!r}; {hint}"


# Introspection of Config classes


def nested_config(annotation: Any) -> type[Config] | None:
    """The Config in `X`, `X | None`, `tuple[X, ...]` or `dict[str, X]`, if there is one."""
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation if issubclass(annotation, Config) else None
    return next(filter(None, map(nested_config, get_args(annotation))), None)


def _fields_at(cls: type[Config], keys: Iterable[int | str]) -> dict[str, FieldInfo]:
    section = _config_at(cls, keys)
    return dict(section.model_fields) if section else {}


def _config_at(cls: type[Config] | None, keys: Iterable[int | str]) -> type[Config] | None:
    """Return the Config at `keys`, where list indices and keys of a dict of Configs stand for their elements."""
    for key in keys:
        field = cls.model_fields.get(str(key)) if cls else None
        cls = nested_config(field.annotation) if field else cls
    return cls


def paths(cls: type[Config], prefix: str = "") -> Iterator[str]:
    """Yield the path of every key, including sections."""
    for name, field in cls.model_fields.items():
        yield prefix + name
        nested = nested_config(field.annotation)
        if nested:
            yield from paths(nested, f"{prefix}{name}.")


def json_schema(cls: type[Config]) -> dict[str, Any]:
    """Return the JSON schema of partial files: no key is required, and null removes one (`merge`)."""
    schema: dict[str, Any] = _partial(cls.model_json_schema())
    return schema


def _partial(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_partial(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _partial(value) for key, value in schema.items() if key not in ("properties", "required", "default")}
    if fields := schema.get("properties"):
        made["properties"] = {
            name: {"description": field.get("description", ""), "anyOf": [_partial(field), {"type": "null"}]}
            for name, field in fields.items()
        }
    return made


def describe(config: Config, defaults: Config | None = None, prefix: str = "") -> list[FieldLine]:
    """Return every leaf in order of declaration. defaults: the parent's, which may differ from the class's."""
    lines: list[FieldLine] = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        standard = field.get_default(call_default_factory=True) if defaults is None else getattr(defaults, name)
        if isinstance(value, Config):
            lines += describe(value, standard if type(standard) is type(value) else None, f"{prefix}{name}.")
        else:
            is_default = standard is not REQUIRED and bool(value == standard)
            lines.append(FieldLine(prefix + name, value, is_default, field.description or "", standard))
    return lines


def describe_sections(config: Config, prefix: str = "") -> dict[str, str]:
    """Return path -> help of every nested Config present: `{"training": "the learner", "training.optimizer": ...}`."""
    sections = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Config):
            sections[prefix + name] = field.description or ""
            sections |= describe_sections(value, f"{prefix}{name}.")
    return sections
