"""What one run is, as a frozen document whose digest is its identity; and the record that it leaves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, get_args

from scalarlens.artifact import refuse_large_options
from scalarlens.errors import ArtifactError, ScalarLensError, UsageError, unknown_name
from scalarlens.job import LARGEST_SEED
from scalarlens.model import ModelSpec
from scalarlens.registry import fit_option
from scalarlens.storage import as_stored, one_line, sha256_of, shown, to_json
from scalarlens.table.tensorizer import InputScale
from scalarlens.training import Recipe

#: how a run is made and judged; a change that moves results raises it, and older records are refused
PROTOCOL = 1
#: how often a run is tried under one spec
ATTEMPTS = 2
Status = Literal["done", "failed"]


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides the result of one run; where and how it runs is in its record, not here.

    Options are bound to the signatures of their parts, so that a default left out and the same value written out
    are one run. `data` is the digest of a prepared table. `limit_rows` keeps the first rows of its train split;
    valid and test stay whole, and so do the training statistics, which were fitted once.

    >>> spec = RunSpec("ab" * 32, "deer", "dnn", Recipe(), "raw", seed=2026)
    >>> spec.digest == RunSpec.from_tables(spec.to_tables()).digest
    True
    """

    data: str
    encoder: str
    backbone: str
    recipe: Recipe
    input_scale: InputScale
    seed: int
    encoder_options: Mapping[str, Any] = field(default_factory=dict)
    backbone_options: Mapping[str, Any] = field(default_factory=dict)
    limit_rows: int | None = None
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        if not (isinstance(self.data, str) and re.fullmatch("[0-9a-f]{64}", self.data)):
            raise UsageError(f"data is named by the digest of a prepared table; got {shown(self.data)}")
        if self.input_scale not in get_args(InputScale):
            raise unknown_name("input scale", str(self.input_scale), get_args(InputScale))
        if not _is_count(self.seed) or not 0 <= self.seed < LARGEST_SEED:
            raise UsageError(f"a seed is a whole number from 0 and below 2**63; got {self.seed!r}")
        if self.limit_rows is not None and not (_is_count(self.limit_rows) and self.limit_rows >= 1):
            raise UsageError(f"a row limit is a whole number from 1; got {self.limit_rows!r}")
        if self.protocol != PROTOCOL:
            raise UsageError(f"protocol {self.protocol!r} is not the one of this version, {PROTOCOL}")
        defaults, given = vars(Recipe()), vars(self.recipe)
        fitted = {name: fit_option(f"recipe.{name}", defaults[name], value) for name, value in given.items()}
        object.__setattr__(self, "recipe", replace(self.recipe, **fitted))
        model = self.model.resolved()
        refuse_large_options(model.to_tables(), UsageError)
        # Views, because an option changed later would leave the digest behind.
        object.__setattr__(self, "encoder_options", MappingProxyType(model.encoder_options))
        object.__setattr__(self, "backbone_options", MappingProxyType(model.backbone_options))

    @property
    def model(self) -> ModelSpec:
        """The shape and the start of the model."""
        recipe = self.recipe
        return ModelSpec(
            self.encoder,
            self.backbone,
            recipe.embedding_dim,
            recipe.tower,
            recipe.category_std,
            dict(self.encoder_options),
            dict(self.backbone_options),
        )

    @cached_property
    def digest(self) -> str:
        """The identity of the run."""
        return sha256_of(to_json(self.to_tables()))

    def to_tables(self) -> dict[str, Any]:
        """The spec as JSON has it."""
        options = {"encoder_options": dict(self.encoder_options), "backbone_options": dict(self.backbone_options)}
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return as_stored({**fields, **options, "recipe": asdict(self.recipe)})

    @classmethod
    def from_tables(cls, tables: dict[str, Any]) -> RunSpec:
        return cls(**{**tables, "recipe": Recipe(**tables["recipe"])})

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return RunSpec.from_tables, (self.to_tables(),)

    def __str__(self) -> str:
        return f"{self.encoder} on {self.backbone}, {self.input_scale}, seed {self.seed} ({self.digest[:8]})"


@dataclass(frozen=True)
class RunRecord:
    """What a run ended with: its results, or why it failed; and how and where it was executed.

    `metrics` has those of the valid and of the test split. `execution` names device, runner, jobs, threads and the
    way of executing. A failed record has an `error` with type and message, no metrics, and the history up to there.
    """

    spec: RunSpec
    status: Status
    attempts: int
    execution: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    timings: dict[str, Any]
    history: list[dict[str, Any]]
    best_epoch: int = 0
    metrics: dict[str, dict[str, float | int | None]] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    error: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            raise UsageError(f"a record is done or failed; got {self.status!r}")
        if not (_is_count(self.attempts) and 1 <= self.attempts <= ATTEMPTS):
            raise UsageError(f"a run is attempted 1 to {ATTEMPTS} times; got {self.attempts!r}")
        if self.status == "failed" and (self.error is None or self.metrics):
            raise UsageError("a failed record says why, and has no metrics")
        if self.status == "done" and (self.error is not None or undefined_metrics(self.metrics)):
            raise UsageError("a done record has AUC and log loss of valid and test, and no error")

    @property
    def finished(self) -> bool:
        """Whether nothing is left to try."""
        return self.status == "done" or self.attempts >= ATTEMPTS

    @property
    def results(self) -> tuple[Any, ...]:
        """What two executions of one spec must agree in to be the same."""
        return self.status, self.metrics, self.best_epoch, self.history

    def to_document(self) -> dict[str, Any]:
        """The record as its file has it, with the digest of everything in it."""
        document = as_stored({**vars(self), "spec": self.spec.to_tables(), "digest": self.spec.digest})
        return {**document, "content_digest": _content_digest(document)}

    @classmethod
    def from_document(cls, document: dict[str, Any], source: str) -> RunRecord:
        """A record out of a document that is whole, of this protocol, and of the spec whose digest it carries."""
        body = {key: value for key, value in document.items() if key != "content_digest"}
        if document.get("content_digest") != _content_digest(body):
            raise ArtifactError(f"{source} is not the whole record that was written: its content has another digest")
        try:
            tables = body["spec"]
            if tables["protocol"] != PROTOCOL:
                raise ArtifactError(
                    f"{source} is of protocol {shown(tables['protocol'])}, and this version runs {PROTOCOL}; "
                    "keep records of different protocols in different stores"
                )
            fields = {key: value for key, value in body.items() if key != "digest"}
            record = cls(**{**fields, "spec": RunSpec.from_tables(tables)})
            if record.spec.to_tables() != tables or record.spec.digest != body["digest"]:
                raise ValueError("its options are not the ones that its parts have now")
        except ArtifactError:
            raise
        except (ScalarLensError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArtifactError(f"{source} is stale or foreign: {one_line(error)}; run it again elsewhere") from error
        return record


def undefined_metrics(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a run must have measured and has not.

    >>> undefined_metrics({"valid": {"auc": 0.5, "log_loss": 0.7}, "test": {"auc": None, "log_loss": 0.7}})
    ['test auc']
    """
    wanted = [(split, name) for split in ("valid", "test") for name in ("auc", "log_loss")]
    return [f"{split} {name}" for split, name in wanted if not _is_finite(metrics.get(split, {}).get(name))]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _content_digest(document: dict[str, Any]) -> str:
    return sha256_of(to_json(document))
