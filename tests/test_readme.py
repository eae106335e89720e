"""Every example of the README runs as it stands."""

from __future__ import annotations

import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from scalarlens.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tables that the examples speak of."""
    rng = np.random.default_rng(0)
    rows = 600
    columns = {
        "price": np.round(rng.lognormal(3, 1, rows), 2),
        "views": rng.integers(0, 5000, rows),
        "country": rng.choice(["DE", "FR", "IT", "ES"], rows),
        "clicked": rng.integers(0, 2, rows),
    }
    path = tmp_path_factory.mktemp("readme")
    pq.write_table(pa.table(columns), path / "train.parquet")
    pa.csv.write_csv(pa.table(columns).drop_columns(["clicked"]), path / "rows.csv")
    return path


def run_line(line: str) -> int:
    command, _, target = line.removeprefix("$ ").partition(" > ")
    program, *arguments = shlex.split(command)
    assert program == "scalarlens"
    if not target:
        return main(arguments)
    with Path(target.strip()).open("w") as file, redirect_stdout(file):
        return main(arguments)


def test_the_commands_and_the_python_run_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    lines = [line for block in blocks("console") for line in block.splitlines()]
    assert len(lines) >= 8
    for line in lines:
        assert run_line(line) == 0, line
    assert pq.read_table("scores.parquet").column_names == ["probability"]
    examples = blocks("python")
    assert len(examples) >= 2
    for code in examples:
        exec(compile(code, "README.md", "exec"), {})


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parents[1]
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in t]
    assert len(targets) >= 6
    assert [target for target in targets if not (root / target).exists()] == []
