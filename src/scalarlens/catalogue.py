"""What exists, as facts read off the registered parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalarlens import backbones, encoders
from scalarlens.registry import options_of
from scalarlens.table.statistics import TrainingStatistics


def catalogue(kind: str, n_values: int, n_categories: int, embedding_dim: int) -> dict[str, Any]:
    """Every part of one kind by name; parameters are counted for this shape, on heavy-tailed made-up columns."""
    if kind == "encoders":
        statistics = made_up_statistics(n_values)
        return {name: _encoder(name, statistics, n_categories, embedding_dim) for name, _ in encoders.encoders}
    if kind == "backbones":
        return {name: _backbone(name, n_values, n_categories, embedding_dim) for name, _ in backbones.backbones}
    return {}


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


def summary_of(part: type) -> str:
    """The first sentence of a part's docstring."""
    return (part.__doc__ or "").strip().partition("\n\n")[0].replace("\n    ", " ")


def show_catalogue(kind: str, found: dict[str, Any]) -> str:
    """One line per part."""
    if not found:
        return f"no {kind} are registered"
    width = max(map(len, found))
    if kind == "encoders":
        return "\n".join(
            f"{name:{width}}  {entry['context']:11}  {entry['parameters']:>9,} parameters  {entry['source']}"
            for name, entry in found.items()
        )
    return "\n".join(
        f"{name:{width}}  {entry['parameters']:>9,} parameters  {entry['source']}" for name, entry in found.items()
    )
