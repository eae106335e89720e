"""Where a mesh starts: enough distinct boundaries on any column, where its rows are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scalarlens.encoders.blocks import LearnedMesh, distinct_quantiles, starting_widths
from scalarlens.errors import UsageError
from scalarlens.table.statistics import TrainingStatistics

STARTS = ["quantile", "uniform", "blend"]
columns = hnp.arrays(
    np.float64,
    st.integers(1, 60),
    elements=st.one_of(st.floats(-1e308, 1e308), st.integers(-3, 3).map(float), st.just(float("nan"))),
)


def mesh_of(column: np.ndarray, start: str, intervals: int = 16) -> LearnedMesh:
    return LearnedMesh(TrainingStatistics.from_arrays(column[:, None]), 4, intervals=intervals, mesh_start=start)


@settings(max_examples=60, deadline=None)
@given(column=columns, start=st.sampled_from(STARTS), intervals=st.integers(1, 40))
def test_any_column_gives_a_mesh(column: np.ndarray, start: str, intervals: int) -> None:
    mesh = mesh_of(column, start, intervals)
    unit = mesh.unit_boundaries()[0]
    assert len(unit) == intervals + 1
    assert (unit[0], unit[-1]) == (0.0, 1.0)
    assert (unit.diff() > 0).all()
    tokens = mesh(torch.from_numpy(column[:, None]))
    assert tokens.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), intervals=st.integers(2, 32))
def test_quantile_intervals_hold_even_shares(seed: int, intervals: int) -> None:
    """Without ties, no interval of a continuous column holds much more than its share."""
    column = np.random.default_rng(seed).lognormal(0, 2, 4000)
    boundaries = mesh_of(column, "quantile", intervals).boundaries()[0].numpy()
    shares = np.histogram(column, boundaries)[0] / len(column)
    assert shares.max() < 1.2 / intervals + 0.005
    uniform = np.histogram(column, mesh_of(column, "uniform", intervals).boundaries()[0].numpy())[0] / len(column)
    assert uniform.max() > 0.5  # the check rejects the start that the tail ruins


def test_blend_halves_the_share_of_both() -> None:
    """Boundaries at the quantiles of the even mixture, by an independent inversion on a fine grid."""
    column = np.random.default_rng(0).lognormal(0, 1, 50_000)
    found = mesh_of(column, "blend", 8).boundaries()[0].numpy()
    low, high = column.min(), column.max()
    fine = np.linspace(low, high, 400_001)
    mixture = 0.5 * np.searchsorted(np.sort(column), fine, side="right") / len(column) + 0.5 * (fine - low) / (
        high - low
    )
    wanted = np.interp(np.arange(1, 8) / 8, mixture, fine)
    np.testing.assert_allclose(found[1:-1], wanted, rtol=0.01)


def test_few_distinct_values_each_get_a_boundary() -> None:
    column = np.array([0.0, 0.0, 0.0, 1.0, 5.0, 5.0, 40.0])
    boundaries = mesh_of(column, "quantile").boundaries()[0].numpy()
    for value in np.unique(column):
        assert np.abs(boundaries - value).min() < 1e-4


def test_the_widest_gap_is_halved() -> None:
    grid = TrainingStatistics.from_arrays(np.array([[0.0], [1.0], [1.0], [4.0]])).unit_quantiles()[0]
    steps = np.where(grid < 0.25, 0.0, np.where(grid < 1.0, 0.25, 1.0))
    np.testing.assert_array_equal(distinct_quantiles(steps, 4), [0, 0.25, 0.4375, 0.625, 1.0])
    np.testing.assert_array_equal(distinct_quantiles(np.zeros(4097), 4), [0, 0.25, 0.5, 0.75, 1.0])


def test_many_intervals_take_no_time() -> None:
    statistics = TrainingStatistics.from_arrays(np.ones((5, 3)))
    assert starting_widths(statistics, 1 << 14, "quantile").shape == (3, 1 << 14)


def test_the_start_survives_the_softmax_and_the_floor() -> None:
    column = np.random.default_rng(3).lognormal(0, 2, 5000)
    mesh = mesh_of(column, "quantile")
    wanted = distinct_quantiles(TrainingStatistics.from_arrays(column[:, None]).unit_quantiles()[0], 16)
    np.testing.assert_allclose(mesh.unit_boundaries()[0].detach().numpy(), wanted, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("options", [{"width_floor": 0.0}, {"temperature": 0.0}, {"width_floor": -1.0}])
def test_a_mesh_that_could_collapse_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="above 0"):
        LearnedMesh(TrainingStatistics.from_arrays(np.ones((3, 1))), 4, **options)


def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'uniform'"):
        mesh_of(np.arange(5.0), "uniforms")
