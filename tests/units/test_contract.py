"""The contract and the model card: facts in serving units, against formulas on the raw training rows."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_artifacts import SCHEMA, Sealed, present

from scalarlens.artifact import seal
from scalarlens.backbones import Tower
from scalarlens.card import model_card
from scalarlens.cli import main
from scalarlens.contract import (
    CATEGORICAL_POLICIES,
    NUMERIC_POLICIES,
    SHOWN_CATEGORIES,
    build_contract,
    check_contract,
    describes,
    show_contract,
)
from scalarlens.errors import ArtifactError
from scalarlens.model import CtrModel, ModelSpec
from scalarlens.storage import as_stored, read_json

few_examples = settings(max_examples=80, deadline=None, derandomize=True, database=None)
NUMERIC = ("spend", "balance", "never", "constant")


def column(one: Sealed, name: str) -> np.ndarray:
    """The training numbers of a column, its markers taken out."""
    return present([None if row[name] == -999.0 else row[name] for row in one.rows])


def fields(one: Sealed) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in read_json(one.folder / "contract.json")["fields"]}


# what it says


@pytest.mark.parametrize("scale", ["raw", "zscore"])
def test_numeric_fields_are_described_in_the_units_of_the_training_rows(scale: str, sealed: dict[str, Sealed]) -> None:
    one = sealed[scale]
    for name in NUMERIC:
        entry, values = fields(one)[name], column(one, name)
        assert entry["kind"] == "numeric"
        assert entry["dtype"] == "float64"
        assert entry["distinct_values"] == len(np.unique(values))
        assert entry["missing_rate"] == (len(one.rows) - len(values)) / len(one.rows)
        assert entry["policies"] == NUMERIC_POLICIES
        if len(values) == 0:
            assert entry["training_range"] is entry["quantiles"] is None
            continue
        assert entry["training_range"] == [values.min(), values.max()]
        sketch = np.quantile(values, np.arange(17) / 16)
        np.testing.assert_allclose(entry["quantiles"], sketch, rtol=1e-12, atol=0)
        assert [entry["quantiles"][0], entry["quantiles"][-1]] == entry["training_range"]
    assert [fields(one)[name]["unit"] for name in NUMERIC] == ["EUR", "", "km", "°C"]
    assert fields(one)["balance"]["missing_markers"] == [-999.0, "n/a"]


def test_categorical_fields_are_described_by_their_training_counts(sealed: dict[str, Sealed]) -> None:
    one, total = sealed["raw"], len(sealed["raw"].rows)
    for name, min_count in (("ville", 16), ("code", 1)):
        entry = fields(one)[name]
        counts = Counter(str(row[name]) for row in one.rows if row[name] is not None)
        kept = sorted((t for t in counts if counts[t] >= min_count), key=lambda text: (-counts[text], text))
        assert entry["kind"] == "categorical"
        assert (entry["categories"], entry["min_count"]) == (len(kept), min_count)
        assert entry["most_frequent"] == kept[:SHOWN_CATEGORIES]
        assert entry["missing_rate"] == sum(row[name] is None for row in one.rows) / total
        assert entry["rare_rate"] == sum(n for n in counts.values() if n < min_count) / total
        assert entry["policies"] == CATEGORICAL_POLICIES
    assert 0 < fields(one)["ville"]["rare_rate"] < 1
    assert fields(one)["code"]["rare_rate"] == 0


def test_the_document_names_what_the_model_was_trained_on(sealed: dict[str, Sealed]) -> None:
    for one in sealed.values():
        contract = read_json(one.folder / "contract.json")
        assert contract["format"] == 1
        assert contract["training_rows"] == len(one.rows)
        assert contract["training_digest"] == one.table.training_digest
        assert contract["statistics_digest"] == one.table.statistics.digest()
        assert contract["schema"] == SCHEMA.to_tables()
    digests = {name: read_json(one.folder / "contract.json")["training_digest"] for name, one in sealed.items()}
    assert digests["raw"] == digests["zscore"] != digests["other"]


# the mesh


def edges_by_formula(one: Sealed, *, unscaled: bool = True) -> np.ndarray:
    """`b = low + (high - low) cumsum(q)` with the floored softmax widths `q`; standardized values mapped back."""
    state = one.artifact.model.state_dict()
    options = one.artifact.spec["model"]["encoder_options"]
    logits = state["encoder.mesh.width_logits"].double().numpy() / options["temperature"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    q = (p + options["width_floor"]) / (1 + p.shape[1] * options["width_floor"])
    unit = np.concatenate([np.zeros((len(q), 1)), q.cumsum(1)], axis=1)
    columns = [column(one, name) for name in NUMERIC]
    low, high = (np.array([f(c) if len(c) else 0.0 for c in columns]) for f in (np.min, np.max))
    if one.artifact.tensorizer.input_scale == "raw":
        # A constant column has a mesh of length 1 that starts at its value.
        return low[:, None] + np.where(high > low, high - low, 1.0)[:, None] * unit
    mean, std = (np.array([f(c) if len(c) else 0.0 for c in columns]) for f in (np.mean, np.std))
    scale = np.maximum(std, 1e-12)
    low, high = (low - mean) / scale, (high - mean) / scale
    edges = low[:, None] + np.where(high > low, high - low, 1.0)[:, None] * unit
    return mean[:, None] + scale[:, None] * edges if unscaled else edges


@pytest.mark.parametrize("scale", ["raw", "zscore"])
def test_mesh_edges_are_in_serving_units(scale: str, sealed: dict[str, Sealed]) -> None:
    one = sealed[scale]
    wanted = edges_by_formula(one)
    found = np.array([fields(one)[name]["mesh_edges"] for name in NUMERIC])
    span = np.maximum(np.abs(wanted).max(1, keepdims=True), 1e-9)
    assert (np.abs(found - wanted) / span).max() < 1e-11
    assert (np.diff(found) >= 0).all()
    for i, name in enumerate(("spend", "balance")):
        assert (np.diff(found[i]) > 0).all()
        assert np.abs(found[i][[0, -1]] - fields(one)[name]["training_range"]).max() < 1e-11 * span[i]
    if scale == "zscore":  # the mutant: edges as the encoder sees them
        wrong = edges_by_formula(one, unscaled=False)
        assert (np.abs(found - wrong) / span).max() > 0.5


@pytest.mark.parametrize("scale", ["raw", "zscore"])
def test_a_value_at_an_edge_lies_at_that_node_of_the_mesh(scale: str, sealed: dict[str, Sealed]) -> None:
    artifact = sealed[scale].artifact
    edges = np.array([fields(sealed[scale])[name]["mesh_edges"] for name in NUMERIC])
    scaled = artifact.tensorizer.scale(torch.from_numpy(edges.T.copy()))
    k, a = artifact.model.encoder.mesh.locate(scaled)
    place = (k + a).detach().numpy().T
    np.testing.assert_allclose(place[:2], np.tile(np.arange(9), (2, 1)), atol=1e-5)


def test_an_encoder_without_a_mesh_has_no_edges(sealed: dict[str, Sealed]) -> None:
    tensorizer = sealed["raw"].artifact.tensorizer
    spec = ModelSpec("linear", "dnn", 4, Tower((8,)), 0.01)
    artifact = seal(
        CtrModel.build(spec, tensorizer.encoder_statistics), tensorizer, spec,
        training={"seed": 1, "recipe": {}}, metrics={}, training_digest="0",
    )  # fmt: skip
    assert not any("mesh_edges" in entry for entry in artifact.contract["fields"])
    assert describes(artifact.contract, build_contract(artifact.model, tensorizer, "0"))


# whether it describes a model


def leaves(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    if isinstance(document, dict | list) and document:
        for key, item in document.items() if isinstance(document, dict) else enumerate(document):
            yield from leaves(item, (*path, key))
    else:
        yield path


def changed(document: Any, path: tuple[Any, ...], change: Any) -> Any:
    """A copy with one value replaced by what `change` makes of it."""
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = change(inner[path[-1]])
    return document


def another(value: Any) -> Any:
    if isinstance(value, bool | str | list | dict) or value is None:
        return "another" if value != "another" else "again"
    return value + (abs(value) or 1) * 1e-4 + 1e-3


def rebuilt(one: Sealed) -> dict[str, Any]:
    artifact = one.artifact
    return build_contract(artifact.model, artifact.tensorizer, artifact.contract["training_digest"])


@few_examples
@given(data=st.data(), scale=st.sampled_from(["raw", "zscore"]))
def test_a_contract_with_any_other_value_does_not_describe_the_model(
    data: st.DataObject, scale: str, sealed: dict[str, Sealed]
) -> None:
    stored, own = sealed[scale].artifact.contract, rebuilt(sealed[scale])
    assert describes(stored, own)
    path = data.draw(st.sampled_from([p for p in leaves(stored) if "mesh_edges" not in p]))
    assert not describes(changed(stored, path, another), own)


@few_examples
@given(data=st.data())
def test_mesh_edges_may_differ_by_rounding_and_no_more(data: st.DataObject, sealed: dict[str, Sealed]) -> None:
    stored, own = sealed["raw"].artifact.contract, rebuilt(sealed["raw"])
    path = data.draw(st.sampled_from([p for p in leaves(stored) if "mesh_edges" in p]))
    edges = stored["fields"][path[1]]["mesh_edges"]
    span = edges[-1] - edges[0]
    assert describes(changed(stored, path, lambda edge: edge * (1 + 1e-13) + 1e-13 * span), own)
    assert not describes(changed(stored, path, lambda edge: edge * (1 + 1e-6) + 1e-6 * span), own)
    assert not describes(changed(stored, path, lambda edge: edge * (1 - 1e-6) - 1e-6 * span), own)


@pytest.mark.parametrize("kind", ["numeric", "categorical"])
def test_a_contract_with_two_columns_swapped_does_not_describe_the_model(kind: str, sealed: dict[str, Sealed]) -> None:
    stored, own = sealed["raw"].artifact.contract, rebuilt(sealed["raw"])

    def swap(columns: list[Any]) -> list[Any]:
        return [columns[1], columns[0], *columns[2:]]

    assert not describes(changed(stored, ("schema", kind), swap), own)
    assert not describes(changed(stored, ("fields",), swap), own)
    for shorter in (lambda fields: fields[:-1], lambda fields: [*fields, fields[-1]], lambda fields: []):
        assert not describes(changed(stored, ("fields",), shorter), own)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "has format None; this version reads 1"),
        ({"format": 2, "training_rows": 5}, "has format 2"),
        ({"format": "\n" * 99}, r"has format '\\n"),
        ({"format": 1}, "training_rows from 1; got None"),
        *(({"format": 1, "training_rows": rows}, "training_rows from 1") for rows in (0, -1, 1.0, "5", True, 2**63)),
    ],
)
def test_a_document_that_is_no_contract_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        check_contract(document, Path("somewhere"))
    assert str(caught.value).isprintable()
    check_contract({"format": 1, "training_rows": 1}, Path("somewhere"))


# for people


def test_the_contract_is_printed_with_one_line_per_field(
    sealed: dict[str, Sealed], capsys: pytest.CaptureFixture[str]
) -> None:
    one = sealed["zscore"]
    assert main(["contract", "show", str(one.folder)]) == 0
    shown = capsys.readouterr().out
    assert shown == show_contract(one.artifact.contract) + "\n"
    lines = {line.split("  ")[0]: line for line in shown.splitlines()}
    spend = fields(one)["spend"]
    for text in ("EUR", f"{spend['training_range'][0]:.9g} to {spend['training_range'][1]:.9g}", "9.3%"):
        assert text in lines["spend"]
    assert "no value in training" in lines["never"]
    assert "36.6 to 36.6" in lines["constant"]
    assert f"{fields(one)['ville']['categories']} categories" in lines["ville"]
    assert "input scale zscore, 300 training rows, label 'clicked'" in shown
    assert one.table.training_digest in shown
    assert main(["contract", "show", "--json", str(one.folder)]) == 0
    assert json.loads(capsys.readouterr().out) == one.artifact.contract


def test_the_card_states_what_the_files_hold(sealed: dict[str, Sealed]) -> None:
    one = sealed["raw"]
    card = (one.folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    low, high = fields(one)["balance"]["training_range"]
    for line in (
        "# scalarlens on dnn",
        "| seed | 1 |",
        "| training rows | 300 |",
        f"| training digest | `{one.table.training_digest}` |",
        f"| valid auc | {one.artifact.metrics['valid_auc']:.6g} |",
        f"| balance |  | {low:.9g} to {high:.9g} | {fields(one)['balance']['missing_rate']:.2%} |",
        "| never | km | no value in training | 100.00% |",
    ):
        assert line in card.splitlines()


def test_a_name_cannot_break_the_tables_of_the_card(sealed: dict[str, Sealed]) -> None:
    artifact = sealed["raw"].artifact
    contract = changed(artifact.contract, ("fields", 0, "name"), lambda name: "a|b\n| c")
    card = model_card(artifact.spec, contract, artifact.metrics)
    assert r"| a\|b \| c | EUR |" in card
    assert len(card.splitlines()) == len(artifact.card().decode().splitlines())


def test_what_is_sealed_is_what_its_files_give_back(sealed: dict[str, Sealed]) -> None:
    artifact = sealed["raw"].artifact
    for document in (artifact.contract, artifact.spec, artifact.metrics):
        assert as_stored(document) == document
        assert list(as_stored(document)) == list(document)
    assert not any(isinstance(v, float) and not math.isfinite(v) for v in artifact.metrics.values())
