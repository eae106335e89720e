"""Which columns are numbers, categories, label, group and time; their units; and what means "missing"."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scalarlens.errors import DataError, UsageError, unknown_name


@dataclass(frozen=True)
class NumericColumn:
    """A column of numbers, in the unit that it is served in. `missing`: numbers or texts that mean "missing"."""

    name: str
    unit: str = ""
    missing: tuple[str | float, ...] = ()


@dataclass(frozen=True)
class CategoricalColumn:
    """A column of categories, compared as text. A category rarer than `min_count` in training is unseen."""

    name: str
    min_count: int = 1
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Schema:
    """The columns of a table that a model uses, and what each of them means.

    A null, NaN or empty cell is missing in every column; `missing` adds texts that mean the same everywhere.

    >>> schema = Schema((NumericColumn("price", unit="EUR"),), (CategoricalColumn("country"),), label="clicked")
    >>> print(schema.to_toml(), end="")
    label = "clicked"
    <BLANKLINE>
    [numeric]
    "price" = { unit = "EUR" }
    <BLANKLINE>
    [categorical]
    "country" = {}
    >>> Schema.from_toml(schema.to_toml()) == schema
    True
    """

    numeric: tuple[NumericColumn, ...]
    categorical: tuple[CategoricalColumn, ...]
    label: str
    group: str | None = None
    time: str | None = None
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        roles = [*self.features, self.label]
        twice = sorted(name for name, uses in Counter(roles).items() if uses > 1)
        if twice:
            raise UsageError(f"each column has one role in a schema; used twice: {', '.join(twice)}")
        if not self.features:
            raise UsageError("a schema needs at least one numeric or categorical column; it has none")

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the model's inputs: numeric first, then categorical."""
        return (*(column.name for column in self.numeric), *(column.name for column in self.categorical))

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that preparation reads; a group may also be a feature."""
        extra = (name for name in (self.group, self.time) if name is not None)
        return tuple(dict.fromkeys((*self.features, self.label, *extra)))

    def digest(self) -> str:
        """SHA-256 over the meaning, not over the spelling of the file."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()

    def to_toml(self, comments: Mapping[str, str] | None = None) -> str:
        """The schema as a TOML file; `comments` stand behind the line of the column that they speak of."""
        notes = comments or {}
        lines = [f"{key} = {_toml(getattr(self, key))}" for key in _SCALARS if getattr(self, key)]
        for kind in ("numeric", "categorical"):
            lines += ["", f"[{kind}]"]
            columns: tuple[NumericColumn | CategoricalColumn, ...] = getattr(self, kind)
            for column in columns:
                note = notes.get(column.name)
                entry = ", ".join(f"{key} = {_toml(value)}" for key, value in _options(column).items())
                body = f"{{ {entry} }}" if entry else "{}"
                lines.append(f"{_toml(column.name)} = {body}" + (f"  # {note}" if note else ""))
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, text: str, source: str = "schema") -> Schema:
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{source} is not valid TOML: {error}") from error
        return cls.from_tables(tables, source)

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], source: str = "schema") -> Schema:
        """A schema from nested tables, as TOML and JSON give them; unknown keys are refused."""
        for key in tables:
            if key not in (*_SCALARS, "numeric", "categorical"):
                raise unknown_name(f"key in {source}", key, (*_SCALARS, "numeric", "categorical"))
        if not isinstance(tables.get("label"), str):
            raise UsageError(f'{source} needs `label = "..."`, the column to predict; got {tables.get("label")!r}')
        for key in ("group", "time"):
            if not isinstance(tables.get(key), str | None):
                raise UsageError(f"{source}: {key} must be the name of a column; got {tables[key]!r}")
        return cls(
            numeric=tuple(_column(NumericColumn, n, o, source) for n, o in _entries(tables, "numeric", source)),
            categorical=tuple(
                _column(CategoricalColumn, n, o, source) for n, o in _entries(tables, "categorical", source)
            ),
            label=tables["label"],
            group=tables.get("group"),
            time=tables.get("time"),
            missing=_texts(tables.get("missing", []), f"{source}: missing"),
        )

    def to_tables(self) -> dict[str, Any]:
        """The schema as nested tables for JSON; columns are lists there, because their order counts."""
        tables = tomllib.loads(self.to_toml())
        for kind in ("numeric", "categorical"):
            tables[kind] = [{"name": name, **options} for name, options in tables[kind].items()]
        return tables

    @classmethod
    def read(cls, path: str | Path) -> Schema:
        path = Path(path)
        try:
            return cls.from_toml(path.read_text(encoding="utf-8"), source=str(path))
        except FileNotFoundError:
            raise UsageError(
                f"no schema at {path}; write one with `scalarlens schema infer TABLE --label COLUMN > {path}`"
            ) from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


_SCALARS = ("label", "group", "time", "missing")


def _options(column: NumericColumn | CategoricalColumn) -> dict[str, Any]:
    defaults = type(column)(column.name)
    return {key: value for key, value in vars(column).items() if key != "name" and value != getattr(defaults, key)}


def _entries(tables: Mapping[str, Any], kind: str, source: str) -> list[tuple[str, dict[str, Any]]]:
    """Columns of one kind: a table of name = { options }, or a list of names or of tables with a name."""
    given = tables.get(kind, {})
    if isinstance(given, list):
        named = [{"name": item} if isinstance(item, str) else item for item in given]
        if not all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in named):
            raise UsageError(f"{source}: each entry of {kind} needs a name; got {given!r}")
        return [(item["name"], {k: v for k, v in item.items() if k != "name"}) for item in named]
    if not isinstance(given, dict) or not all(isinstance(options, dict) for options in given.values()):
        raise UsageError(f'{source}: [{kind}] holds lines such as `price = {{ unit = "EUR" }}`; got {given!r}')
    return list(given.items())


def _column(
    kind: type[NumericColumn] | type[CategoricalColumn], name: str, options: dict[str, Any], source: str
) -> Any:
    known = [entry.name for entry in fields(kind) if entry.name != "name"]
    for key in options:
        if key not in known:
            raise unknown_name(f"option of column {name!r} in {source}", key, known)
    min_count = options.get("min_count", 1)
    if isinstance(min_count, bool) or not isinstance(min_count, int) or min_count < 1:
        raise UsageError(f"{source}: min_count of {name!r} must be a whole number from 1; got {min_count!r}")
    if not isinstance(options.get("unit", ""), str):
        raise UsageError(f"{source}: unit of {name!r} must be text; got {options['unit']!r}")
    markers = options.get("missing", [])
    if kind is CategoricalColumn:
        options = {**options, "missing": _texts(markers, f"{source}: missing of {name!r}")}
    else:
        options = {**options, "missing": _markers(markers, f"{source}: missing of {name!r}")}
    return kind(name, **options)


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"{where} must be a list of texts; got {value!r}")
    return tuple(value)


def _markers(value: Any, where: str) -> tuple[str | float, ...]:
    fits = isinstance(value, list) and all(
        isinstance(item, str) or (isinstance(item, int | float) and math.isfinite(item)) for item in value
    )
    if not fits:
        raise UsageError(f"{where} must be a list of texts or finite numbers; got {value!r}")
    return tuple(value)


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # A JSON string is a TOML basic string, except that TOML also wants DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
