"""The demo's report: one HTML page without a single outside reference."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from scalarlens.artifact import ModelArtifact
from scalarlens.datasets.click_log import PLACEMENTS, PRICE_TASTE
from scalarlens.encoders.scalarlens import ScalarLens
from scalarlens.svg import PALETTE, Line, Panel, figure

#: rows over which a response is averaged
PROBES = 400
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>scalarlens demo</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2rem auto;padding:0 1rem;color:#1b1f24}}
table{{border-collapse:collapse}}td,th{{padding:.3rem .9rem;border-bottom:1px solid #d8dee4;text-align:right}}
td:first-child,th:first-child{{text-align:left}}svg{{max-width:100%;height:auto}}</style>
<h1>One value, one coordinate, several responses</h1>
<p>A made click log: {rows} training rows with heavy-tailed counts and prices, negative amounts, missing cells and Zipf
categories. The same price raises the click rate in one placement and lowers it in another. Both models read raw units
and share backbone, recipe and seed; only the numerical encoder differs.</p>
{table}
{figure}
<p>Left: where the price lies on the learned mesh, in intervals; the ticks are the mesh edges. The coordinate is the
same in every placement. Right: the mean logit over {probes} test rows as price and placement are replaced, centred;
dashed, the response that generated the clicks.</p></html>
"""


def demo_report(rows: int, results: Mapping[str, Any], bayes: Mapping[str, Any], picture: str) -> str:
    return PAGE.format(rows=f"{rows:,}", table=_table(results, bayes), figure=picture, probes=PROBES)


def response_figure(artifact: ModelArtifact, test_rows: Path) -> str:
    """The coordinate of the price, and the response to it in each placement, as SVG."""
    grid = np.geomspace(0.3, 2000.0, 121)
    probes = pq.read_table(test_rows).slice(0, PROBES)
    edges = np.array(next(e["mesh_edges"] for e in artifact.contract["fields"] if e["name"] == "price"))
    coordinate = Panel(
        "One coordinate for every context",
        "price, EUR",
        "position on the mesh",
        [Line(grid, _mesh_position(artifact, grid), color="#1b1f24")],
        log_x=True,
        marks=edges[1:-1].tolist(),
    )
    lines = []
    for index, placement in enumerate(PLACEMENTS):
        truth = PRICE_TASTE[index] * np.sin(1.4 * (np.log(grid) - 3.0) / 1.4)
        lines.append(Line(grid, truth - truth.mean(), color=PALETTE[index], dashed=True))
        lines.append(Line(grid, _response(artifact, probes, grid, placement), placement, PALETTE[index]))
    response = Panel("A response for each placement", "price, EUR", "mean logit, centred", lines, log_x=True)
    return figure([coordinate, response], "Coordinate of a price, and the response to it in four placements")


def _mesh_position(artifact: ModelArtifact, prices: np.ndarray) -> np.ndarray:
    encoder = artifact.model.encoder
    assert isinstance(encoder, ScalarLens)
    values = torch.zeros(len(prices), encoder.n_values, dtype=torch.float64)
    values[:, 0] = torch.from_numpy(prices)
    with torch.no_grad():
        interval, part = encoder.mesh.locate(values)
    position: np.ndarray = (interval + part)[:, 0].numpy()
    return position


def _response(artifact: ModelArtifact, probes: pa.Table, prices: np.ndarray, placement: str) -> np.ndarray:
    """Mean logit over the probe rows at each price, in one placement, centred over the prices."""
    repeated = pa.concat_tables([probes] * len(prices))
    repeated = _replaced(repeated, "price", pa.array(np.repeat(prices, probes.num_rows)))
    repeated = _replaced(repeated, "placement", pa.array([placement] * repeated.num_rows))
    mean: np.ndarray = artifact.logits(repeated).reshape(len(prices), -1).mean(1)
    return mean - mean.mean()


def _replaced(table: pa.Table, column: str, cells: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(column), column, cells)


def _table(results: Mapping[str, Any], bayes: Mapping[str, Any]) -> str:
    rows = ["<table><tr><th></th><th>AUC</th><th>log loss</th><th>ECE</th><th>best epoch</th></tr>"]
    for name, found in {"Bayes limit": bayes, **results}.items():
        numbers = "".join(f"<td>{found[key]:.4f}</td>" for key in ("auc", "log_loss", "ece"))
        rows.append(f"<tr><td>{escape(name)}</td>{numbers}<td>{found.get('best_epoch', '')}</td></tr>")
    return "".join([*rows, "</table>"])
