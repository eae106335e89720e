"""A made click log in raw units, in which the same value means opposite things in different contexts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from scalarlens.table.schema import CategoricalColumn, NumericColumn, Schema

PLACEMENTS = ("search", "feed", "video", "partner")
#: how a placement turns the response to the price: buyers on search look for cheap, readers of the feed for premium
PRICE_TASTE = np.array([-1.6, 1.6, 0.8, -0.8])
COUNTRIES, ADVERTISERS = 60, 3000

SCHEMA = Schema(
    numeric=(
        NumericColumn("price", unit="EUR"),
        NumericColumn("views_7d", unit="count"),
        NumericColumn("seconds_since_visit", unit="s"),
        NumericColumn("balance_change", unit="EUR"),
        NumericColumn("discount", unit="percent"),
    ),
    categorical=(
        CategoricalColumn("placement"),
        CategoricalColumn("country"),
        CategoricalColumn("advertiser", min_count=2),
    ),
    label="clicked",
    group="country",
)


class ClickLog(NamedTuple):
    """Rows in serving units, and the true logit of each, which no model gets to see."""

    table: pa.Table
    true_logits: np.ndarray


def make_click_log(rows: int, seed: int) -> ClickLog:
    """Draw a click log: heavy-tailed counts and prices, negative amounts, missing cells, Zipf categories.

    >>> log = make_click_log(1000, seed=1)
    >>> log.table.num_rows, log.table.column_names == [*SCHEMA.features, "clicked"]
    (1000, True)
    """
    rng = np.random.default_rng([seed, 0x5CA1A])
    columns = _draw_columns(rows, rng)
    logits = _true_logits(columns, rng)
    clicked = rng.random(rows) < 1 / (1 + np.exp(-logits))
    return ClickLog(_to_table(columns, clicked), logits)


def _draw_columns(rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    seen = rng.random(rows) < 0.7
    return {
        "price": np.round(rng.lognormal(3.0, 1.4, rows), 2),
        "views_7d": np.floor(rng.pareto(0.9, rows) * 3.0).clip(max=5e6),
        "seconds_since_visit": np.where(seen, np.floor(rng.lognormal(9.0, 2.2, rows)), np.nan),
        "balance_change": np.round(np.sign(rng.random(rows) - 0.45) * rng.lognormal(4.0, 1.8, rows), 2),
        "discount": np.where(rng.random(rows) < 0.8, rng.integers(0, 61, rows), np.nan),
        "placement": rng.choice(4, rows, p=[0.4, 0.35, 0.15, 0.1]),
        "country": _zipf(COUNTRIES, rows, rng),
        "advertiser": _zipf(ADVERTISERS, rows, rng),
    }


def _zipf(size: int, rows: int, rng: np.random.Generator) -> np.ndarray:
    weights = 1.0 / np.arange(1, size + 1) ** 1.1
    return rng.choice(size, rows, p=weights / weights.sum())


def _true_logits(columns: dict[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Main effects, and three responses that turn with the context: by placement, by advertiser, by another number."""
    dear = (np.log(columns["price"]) - 3.0) / 1.4
    busy = np.log1p(columns["views_7d"]) / 3.0 - 0.6
    recent = 1.0 - np.nan_to_num(np.log(columns["seconds_since_visit"] + 1.0), nan=16.0) / 9.0
    change = np.sign(columns["balance_change"]) * np.log1p(np.abs(columns["balance_change"])) / 4.0
    discount = np.nan_to_num(columns["discount"], nan=0.0) / 60.0
    advertiser = rng.normal(0.0, 0.5, ADVERTISERS)[columns["advertiser"]]
    leaning = rng.choice([-1.0, 1.0], ADVERTISERS)[columns["advertiser"]]
    country = rng.normal(0.0, 0.3, COUNTRIES)[columns["country"]]
    return (
        -1.9
        + advertiser
        + country
        + 0.5 * np.tanh(busy)
        + 0.6 * recent
        + PRICE_TASTE[columns["placement"]] * np.sin(1.4 * dear)
        + 0.7 * leaning * np.sin(2.0 * busy)
        + 1.2 * change * np.tanh(2.0 * (discount - 0.35))
    )


def _to_table(columns: dict[str, np.ndarray], clicked: np.ndarray) -> pa.Table:
    texts = {
        "placement": np.array(PLACEMENTS)[columns["placement"]],
        "country": np.char.add("c", columns["country"].astype(str)),
        "advertiser": np.char.add("ad-", columns["advertiser"].astype(str)),
    }
    arrays = {name: pa.array(columns[name], from_pandas=True) for name in ("price", "views_7d", "seconds_since_visit")}
    arrays |= {name: pa.array(columns[name], from_pandas=True) for name in ("balance_change", "discount")}
    arrays |= {name: pa.array(text) for name, text in texts.items()}
    return pa.table({**arrays, "clicked": clicked.astype(np.int8)})
