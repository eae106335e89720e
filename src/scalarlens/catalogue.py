"""What exists, as facts read off the registered parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from scalarlens import backbones, encoders
from scalarlens.datasets.source import Source, sources
from scalarlens.registry import options_of
from scalarlens.table.statistics import TrainingStatistics


def catalogue(kind: str, n_values: int, n_categories: int, embedding_dim: int) -> dict[str, Any]:
    """Every part of one kind by name; parameters are counted for this shape, on heavy-tailed made-up columns."""
    if kind == "encoders":
        statistics = made_up_statistics(n_values)
        return {name: _encoder(name, statistics, n_categories, embedding_dim) for name, _ in encoders.encoders}
    if kind == "backbones":
        return {name: _backbone(name, n_values, n_categories, embedding_dim) for name, _ in backbones.backbones}
    return {name: _dataset(name, part) for name, part in sources}


def made_up_statistics(n_values: int) -> TrainingStatistics:
    """Statistics of heavy-tailed counts, the same at every call."""
    counts = np.random.default_rng(0).lognormal(2.0, 2.0, size=(20_000, n_values))
    return TrainingStatistics.from_arrays(np.floor(counts))


def _encoder(name: str, statistics: TrainingStatistics, n_categories: int, embedding_dim: int) -> dict[str, Any]:
    part = encoders.encoders.get(name)
    built = encoders.build(name, statistics, n_categories, embedding_dim)
    return {
        "name": name,
        "summary": summary_of(part),
        "source": part.source.citation,
        "basis": part.source.basis,
        "context": part.context,
        "uses_context": part.context != "none",
        "fitted_statistics": list(part.source.statistics),
        "parameters": sum(parameter.numel() for parameter in built.parameters()),
        "shape": {"values": statistics.n_values, "categories": n_categories, "embedding_dim": embedding_dim},
        "confidence": {"fidelity": part.source.fidelity, "legitimacy": part.source.legitimacy},
        "options": options_of(part),
    }


def _backbone(name: str, n_values: int, n_categories: int, embedding_dim: int) -> dict[str, Any]:
    part = backbones.backbones.get(name)
    built = backbones.build(name, n_values, n_categories, embedding_dim)
    return {
        "name": name,
        "summary": summary_of(part),
        "source": part.citation,
        "linear_branch": part.first_order,
        "parameters": sum(parameter.numel() for parameter in built.parameters()),
        "options": options_of(part),
    }


def _dataset(name: str, part: type[Source]) -> dict[str, Any]:
    return {
        "name": name,
        "summary": summary_of(part),
        "files": [vars(file) for file in part.files],
        "obtain": part.obtain,
        "licence": part.licence,
        "splits": [vars(split) for split in part.splits],
        "default_split": part.splits[0].name,
        "paper_split": part.paper_split,
        "options": options_of(part),
    }


def summary_of(part: type) -> str:
    """The first sentence of a part's docstring."""
    return (part.__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ")


def show_catalogue(kind: str, found: dict[str, Any]) -> str:
    """One line per part; a paragraph per data set."""
    if kind == "datasets":
        return "\n\n".join("\n".join(_dataset_lines(entry)) for entry in found.values())
    width = max(map(len, found))
    if kind == "encoders":
        return "\n".join(
            f"{name:{width}}  {entry['context']:11}  {entry['parameters']:>9,} parameters  {entry['source']}"
            for name, entry in found.items()
        )
    return "\n".join(
        f"{name:{width}}  {entry['parameters']:>9,} parameters  {entry['source']}" for name, entry in found.items()
    )


def _dataset_lines(entry: dict[str, Any]) -> Iterator[str]:
    yield f"{entry['name']}: {entry['summary']}"
    for file in entry["files"]:
        digest = f"\n            SHA-256 {file['sha256']}" if file["sha256"] else ""
        yield f"    file    {file['name']}: {file['what']}{digest}"
    yield f"    obtain  {entry['obtain']}"
    yield f"    licence {entry['licence']}"
    for split in entry["splits"]:
        marks = ["default"] * (split["name"] == entry["default_split"])
        marks += ["the paper's"] * (split["name"] == entry["paper_split"])
        marks += ["needs --seed"] * split["seeded"]
        yield f"    split   {split['name']} ({', '.join(marks) or 'draws nothing'}): {split['rule']}"
    for option, default in entry["options"].items():
        yield f"    option  source.{option}={json.dumps(default)}"
