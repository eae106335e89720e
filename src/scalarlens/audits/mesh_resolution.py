"""How well the intervals of a mesh resolve the rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalarlens.audits.base import Audit, Finding, audits
from scalarlens.audits.subject import Subject
from scalarlens.encoders.blocks import LearnedMesh

#: an interval with this share of a field's rows is worth a warning
CROWDED = 0.9
#: of a coordinate, relative to the largest
ROUNDING = 1e-6


@audits.register("mesh-resolution")
class MeshResolution(Audit):
    """Rows and distinct values in every interval `[b_k, b_{k+1})` of every field, and widths at their floor.

    A report, which judges nothing, unless no field with several values gives them several coordinates.
    """

    question = "do the intervals of the mesh resolve the rows?"

    def examine(self, subject: Subject) -> Finding:
        mesh = getattr(subject.encoder, "mesh", None)
        if not isinstance(mesh, LearnedMesh):
            return Finding(None, f"encoder {subject.encoder_name!r} has no mesh")
        values, _ = subject.inputs
        intervals, coordinates = mesh.locate(values)[0].cpu().numpy(), mesh(values).cpu().numpy()
        fields = [
            _describe(subject, mesh, index, intervals[:, index], coordinates[:, index])
            for index in range(subject.encoder.n_values)
        ]
        warnings = tuple(warning for entry in fields for warning in _warnings(entry))
        varied = [entry for entry in fields if entry["distinct_values"] > 1]
        figures = {
            "fields": {entry["name"]: entry for entry in fields},
            "crowded_fields": sum(_crowded(entry) for entry in fields),
            "floor_limited_widths": sum(entry["floor_limited_widths"] for entry in fields),
        }
        if varied and all(entry["distinct_coordinates"] == 1 for entry in varied):
            return Finding(False, "no field tells any two values apart", figures, warnings)
        return Finding(None, "a report: a crowded interval is a fact about the rows, not a fault", figures, warnings)


def _describe(
    subject: Subject, mesh: LearnedMesh, index: int, intervals: np.ndarray, coordinates: np.ndarray
) -> dict[str, Any]:
    """Where the rows of one field lie; edges in serving units."""
    present = ~np.isnan(subject.values[:, index])
    column, interval = subject.values[present, index], intervals[present]
    count = np.bincount(interval, minlength=mesh.intervals)
    value, first = np.unique(column, return_index=True)
    unit_widths = mesh.unit_boundaries()[index].diff().cpu().numpy()
    edges = subject.artifact.tensorizer.unscale(mesh.boundaries().cpu().numpy())[index]
    # A softmax width below the floor is held up by it: the width is then below twice the least one.
    least = mesh.width_floor / (1 + mesh.intervals * mesh.width_floor)
    return {
        "name": subject.artifact.schema.numeric[index].name,
        "edges": edges.tolist(),
        "share_of_rows": (count / max(count.sum(), 1)).tolist(),
        "distinct_values_per_interval": np.bincount(interval[first], minlength=mesh.intervals).tolist(),
        "distinct_values": len(value),
        "distinct_coordinates": _told_apart(coordinates[present][first]),
        "empty_intervals": int((count == 0).sum()),
        "floor_limited_widths": int((unit_widths < 2 * least).sum()),
        "missing_share": float(1 - present.mean()),
    }


def _told_apart(coordinates: np.ndarray) -> int:
    """How many of these vectors differ by more than the rounding of an interpolation in float32."""
    size = max(float(np.abs(coordinates).max(initial=0.0)), 1e-30)
    return len(np.unique(np.round(coordinates / (ROUNDING * size)), axis=0))


def _crowded(entry: dict[str, Any]) -> bool:
    """Whether one interval holds nearly all rows, though there is more than one value to tell apart in it."""
    widest = int(np.argmax(entry["share_of_rows"]))
    return entry["share_of_rows"][widest] >= CROWDED and entry["distinct_values_per_interval"][widest] > 1


def _warnings(entry: dict[str, Any]) -> list[str]:
    name, found = entry["name"], []
    if _crowded(entry):
        widest = int(np.argmax(entry["share_of_rows"]))
        share, inside = entry["share_of_rows"][widest], entry["distinct_values_per_interval"][widest]
        found.append(
            f"{_percent(share)} of the rows of {name} share interval {widest + 1}, "
            f"with {inside:,} of its {entry['distinct_values']:,} distinct values"
        )
    if entry["distinct_values"] > 1 and entry["distinct_coordinates"] == 1:
        found.append(f"all {entry['distinct_values']:,} distinct values of {name} share one coordinate")
    if entry["floor_limited_widths"]:
        found.append(f"{name} has {entry['floor_limited_widths']} intervals as narrow as the floor allows")
    return found


def _percent(share: float) -> str:
    """Never 100 % for less than all.

    >>> _percent(0.974), _percent(0.9996), _percent(1.0)
    ('97 %', '99 %', '100 %')
    """
    return f"{100 if share == 1 else min(round(100 * share), 99)} %"
