"""Name -> part. A registry finds its parts by importing every module of one package."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from scalarlens.errors import UsageError, unknown_name

Part = TypeVar("Part")


class Registry(Generic[Part]):
    """The parts of one kind, by name.

    >>> colours = Registry("colour", package=None)
    >>> colours.register("teal")(str) is str
    True
    >>> colours.get("teel")
    Traceback (most recent call last):
    ...
    scalarlens.errors.UsageError: unknown colour 'teel'; did you mean 'teal'?
    """

    def __init__(self, kind: str, package: str | None, listing: str = "") -> None:
        self.kind = kind
        self._package = package
        self._listing = listing
        self._parts: dict[str, Part] = {}

    def register(self, name: str) -> Callable[[Part], Part]:
        """Class decorator that files a part under `name`; a name can be taken once."""

        def file_part(part: Part) -> Part:
            holder = self._parts.get(name)
            if holder is not None and _origin(holder) != _origin(part):
                raise UsageError(f"{self.kind} {name!r} is registered twice: {_origin(holder)} and {_origin(part)}")
            self._parts[name] = part
            return part

        return file_part

    def get(self, name: str) -> Part:
        self._discover()
        if name not in self._parts:
            raise unknown_name(self.kind, name, self._parts, self._listing)
        return self._parts[name]

    def name_of(self, part: Part) -> str:
        """The name that a part was registered under."""
        return next(name for name, candidate in self if candidate is part)

    def __iter__(self) -> Iterator[tuple[str, Part]]:
        self._discover()
        return iter(sorted(self._parts.items()))

    def names(self) -> list[str]:
        return [name for name, _ in self]

    def _discover(self) -> None:
        if self._package is None:
            return
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self._package}.{module.name}")


def _origin(part: object) -> str:
    return f"{getattr(part, '__module__', '?')}.{getattr(part, '__qualname__', part)}"


def options_of(part: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only options of a part with their defaults: its signature is its schema."""
    parameters = inspect.signature(part).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def bind_options(kind: str, name: str, part: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Check options against the real signature and fill in its defaults, before any work starts."""
    known = options_of(part)
    for option in options:
        if option not in known:
            raise unknown_name(f"option of {kind} {name!r}", option, known)
    checked = {option: fit_option(f"{kind}.{option}", known[option], value) for option, value in options.items()}
    return {**known, **checked}


def fit_option(name: str, default: Any, value: Any) -> Any:
    """The value in the type of its default; whole numbers count something and start at 1.

    >>> fit_option("recipe.learning_rate", 1e-3, 1)
    1.0
    >>> fit_option("encoder.rank", 16, 0)
    Traceback (most recent call last):
    ...
    scalarlens.errors.UsageError: encoder.rank must be a whole number from 1; got 0
    """
    if isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        fits, wanted = isinstance(value, int) and not isinstance(value, bool) and value >= 1, "a whole number from 1"
    elif isinstance(default, float):
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        wanted, value = "a finite number", float(value) if fits else value
    elif isinstance(default, tuple):
        fits = isinstance(value, list | tuple) and all(isinstance(v, int) and v >= 1 for v in value)
        wanted, value = "a list of whole numbers from 1, such as [256,128]", tuple(value) if fits else value
    else:
        fits, wanted = isinstance(value, type(default)), "text"
    if not fits:
        raise UsageError(f"{name} must be {wanted}; got {value!r}")
    return value
