"""The promise of the house: one new file in `encoders/`, and everything else happens by itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MADE_UP = '''"""Made up: the square root of the number."""

from __future__ import annotations

from torch import Tensor, nn

from scalarlens.encoders.base import Source, ValueEncoder, encoders, lookup_table
from scalarlens.table.statistics import TrainingStatistics


@encoders.register("made-up")
class MadeUp(ValueEncoder):
    """A direction per field, scaled by a bounded number: `e_i = tanh(x_i / steepness) v_i`.

    NOTE[DIFF] Nobody published this.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> import numpy as np, torch
    >>> made_up = MadeUp(TrainingStatistics.from_arrays(np.array([[1.0], [9.0]])), 0, 4)
    >>> bool((made_up(torch.zeros(1, 1).double()) == 0).all())
    True
    """

    source = Source("nobody", basis="none", hazards="It says little.", fidelity=0.0, legitimacy=1.0)

    def __init__(
        self, statistics: TrainingStatistics, n_categories: int, embedding_dim: int, *, steepness: float = 2.0
    ) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        self.steepness = steepness
        self.weight = nn.Parameter(lookup_table(self.n_values, embedding_dim))

    def embed(self, values: Tensor) -> Tensor:
        return (values / self.steepness).tanh().to(self.weight.dtype).unsqueeze(-1) * self.weight
'''


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with one more file."""
    copy = tmp_path_factory.mktemp("project")
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("src", "tests", "docs"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "src" / "scalarlens" / "encoders" / "made_up.py").write_text(MADE_UP)
    return copy


def run(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True)


def test_it_has_a_name_on_the_command_line(extended: Path) -> None:
    listed = json.loads(run(extended, "-m", "scalarlens.cli", "list", "encoders", "--json").stdout)
    assert listed["made-up"]["options"] == {"steepness": 2.0}
    assert listed["made-up"]["parameters"] == 2 * 13 * 16
    assert "made-up" not in json.loads(run(ROOT, "-m", "scalarlens.cli", "list", "encoders", "--json").stdout)


def test_its_options_are_checked(extended: Path, tmp_path: Path) -> None:
    train = ("-m", "scalarlens.cli", "train", str(tmp_path), "--encoder", "made-up", "--backbone", "dnn")
    rest = ("--input-scale", "raw", "--seed", "1", "--out", str(tmp_path / "run"))
    refused = run(extended, *train, *rest, "--option", "encoder.steepnes=3")
    assert refused.returncode == 2
    assert "did you mean 'steepness'" in refused.stderr
    accepted = run(extended, *train, *rest, "--option", "encoder.steepness=3")
    assert accepted.returncode == 3, accepted.stderr  # the options pass; there is no table


def test_it_gets_a_page_and_a_row(extended: Path) -> None:
    assert run(extended, "docs/generate.py").returncode == 0
    page = (extended / "docs" / "encoders" / "made-up.md").read_text()
    assert "e_i = tanh(x_i / steepness) v_i" in page
    assert "It says little." in page
    assert "Nobody published this." in page
    assert (extended / "docs" / "encoders" / "made-up.svg").exists()
    assert "[`made-up`](made-up.md)" in (extended / "docs" / "encoders" / "README.md").read_text()


def test_it_goes_through_every_contract_and_is_exported(extended: Path) -> None:
    plugins = ("-p", "no:randomly", "-p", "no:cacheprovider")
    contracts = ("-m", "pytest", "-v", *plugins, "tests/contracts", "-k", "made-up")
    tested = run(extended, *contracts)
    assert tested.returncode == 0, tested.stdout[-2000:]
    passed = [line for line in tested.stdout.splitlines() if "made-up" in line and "PASSED" in line]
    assert len(passed) >= 20
    assert any("export" in line for line in passed)
