"""The raw-unit input contract of a model: what each field was in training, and what happens to what was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from scalarlens.errors import ArtifactError
from scalarlens.model import CtrModel
from scalarlens.storage import shown
from scalarlens.table.schema import CategoricalColumn, NumericColumn
from scalarlens.table.statistics import QUANTILE_LEVELS, Vocabulary
from scalarlens.table.tensorizer import Tensorizer

CONTRACT_FORMAT = 1
#: quantiles shown per field: 0, 1/16, ..., 1
SKETCH_LEVELS = 16
#: most frequent categories shown per field
SHOWN_CATEGORIES = 5

NUMERIC_POLICIES = {
    "missing": "null, NaN, an empty cell or a listed marker gets this field's own learned token",
    "out_of_range": "scored and counted; mesh encoders clip to the training range",
    "infinite": "clipped to the training range and counted",
}
CATEGORICAL_POLICIES = {
    "missing": f"null, an empty cell or a listed marker gets id 0 of {Vocabulary.FIRST_ID} reserved ids",
    "unseen": "a category that training did not keep gets id 1; scored and counted",
}


def build_contract(model: CtrModel, tensorizer: Tensorizer, training_digest: str) -> dict[str, Any]:
    """The contract as one JSON document, from facts alone."""
    statistics, schema = tensorizer.statistics, tensorizer.schema
    edges = _mesh_edges(model, tensorizer)
    fields = [_numeric(column, tensorizer, i, edges) for i, column in enumerate(schema.numeric)]
    fields += [_categorical(column, statistics.vocabularies[j]) for j, column in enumerate(schema.categorical)]
    return {
        "format": CONTRACT_FORMAT,
        "schema": schema.to_tables(),
        "input_scale": tensorizer.input_scale,
        "training_rows": statistics.rows,
        "training_digest": training_digest,
        "statistics_digest": statistics.digest(),
        "fields": fields,
    }


def describes(contract: dict[str, Any], rebuilt: dict[str, Any]) -> bool:
    """Whether a stored contract says what a model itself says; mesh edges may differ by rounding between machines."""
    pairs = list(zip(contract["fields"], rebuilt["fields"], strict=False))
    for stored, own in pairs:
        edges, wanted = (np.asarray(entry.get("mesh_edges", []), dtype=np.float64) for entry in (stored, own))
        if edges.shape != wanted.shape:
            return False
        if edges.size and not np.allclose(edges, wanted, rtol=1e-9, atol=2e-9 * (wanted[-1] * 0.5 - wanted[0] * 0.5)):
            return False
    without_edges = [
        [{key: value for key, value in entry.items() if key != "mesh_edges"} for entry in document["fields"]]
        for document in (contract, rebuilt)
    ]
    heads = [{key: value for key, value in d.items() if key != "fields"} for d in (contract, rebuilt)]
    return without_edges[0] == without_edges[1] and heads[0] == heads[1]


def check_contract(contract: dict[str, Any], folder: Path) -> None:
    """Refuse a document that is not a contract of this version."""
    if contract.get("format") != CONTRACT_FORMAT:
        raise ArtifactError(
            f"{folder}: contract.json has format {shown(contract.get('format'))}; this version reads {CONTRACT_FORMAT}"
        )
    rows = contract.get("training_rows")
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows < 1 << 63:
        raise ArtifactError(f"{folder}: contract.json needs training_rows from 1; got {shown(rows)}")


def _mesh_edges(model: CtrModel, tensorizer: Tensorizer) -> np.ndarray | None:
    mesh = getattr(model.encoder, "mesh", None)
    return None if mesh is None else tensorizer.unscale(mesh.boundaries().cpu().numpy())


def _numeric(column: NumericColumn, tensorizer: Tensorizer, index: int, edges: np.ndarray | None) -> dict[str, Any]:
    statistics = tensorizer.statistics
    missing = int(statistics.missing[index])
    seen = missing < statistics.rows
    sketch = statistics.quantiles[index, :: QUANTILE_LEVELS // SKETCH_LEVELS].tolist()
    entry = {
        "name": column.name,
        "kind": "numeric",
        "unit": column.unit,
        "dtype": "float64",
        "training_range": [float(statistics.low[index]), float(statistics.high[index])] if seen else None,
        "quantiles": sketch if seen else None,
        "distinct_values": int(statistics.n_unique[index]),
        "missing_rate": missing / statistics.rows,
        "missing_markers": list(column.missing),
        "policies": NUMERIC_POLICIES,
    }
    if edges is not None:
        entry["mesh_edges"] = edges[index].tolist()
    return entry


def _categorical(column: CategoricalColumn, vocabulary: Vocabulary) -> dict[str, Any]:
    total = int(vocabulary.counts.sum()) + vocabulary.missing + vocabulary.rare
    return {
        "name": column.name,
        "kind": "categorical",
        "dtype": "text",
        "categories": len(vocabulary.texts),
        "most_frequent": list(vocabulary.texts[:SHOWN_CATEGORIES]),
        "min_count": column.min_count,
        "rare_rate": vocabulary.rare / total,
        "missing_rate": vocabulary.missing / total,
        "missing_markers": list(column.missing),
        "policies": CATEGORICAL_POLICIES,
    }


def show_contract(contract: dict[str, Any]) -> str:
    """The contract for a person: one line per field."""
    lines = [
        f"input scale {contract['input_scale']}, {contract['training_rows']:,} training rows, "
        f"label {contract['schema']['label']!r}",
        f"training digest {contract['training_digest']}",
        "",
    ]
    table = [("field", "kind", "unit", "training range / categories", "missing", "median / most frequent")]
    table.extend(_line(entry) for entry in contract["fields"])
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    lines += ["", "policies"]
    lines += [f"  numeric {key}: {text}" for key, text in NUMERIC_POLICIES.items()]
    lines += [f"  categorical {key}: {text}" for key, text in CATEGORICAL_POLICIES.items()]
    return "\n".join(lines)


def _line(entry: dict[str, Any]) -> tuple[str, str, str, str, str, str]:
    missing = f"{entry['missing_rate']:.1%}"
    if entry["kind"] == "categorical":
        frequent = ", ".join(entry["most_frequent"][:3])
        return entry["name"], "categorical", "", f"{entry['categories']:,} categories", missing, frequent
    if entry["training_range"] is None:
        return entry["name"], "numeric", entry["unit"], "no value in training", missing, ""
    low, high = entry["training_range"]
    median = entry["quantiles"][SKETCH_LEVELS // 2]
    return entry["name"], "numeric", entry["unit"], f"{low:.9g} to {high:.9g}", missing, f"{median:.9g}"
