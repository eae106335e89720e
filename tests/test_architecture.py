"""The house: which module may import which, and how large a function may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "scalarlens"
#: a module imports only from groups to its left, and from its own
ORDER = [
    {"errors", "registry", "storage", "cluster", "__init__"},
    {"table"},
    {"datasets", "encoders", "backbones", "metrics", "svg"},
    {"model", "catalogue"},
    {"contract", "card"},
    {"artifact", "training"},
    {"scoring", "progress"},
    {"job"},
    {"audits"},
    {"experiments"},
    {"studies"},
    {"report"},
    {"demo"},
    {"cli"},
]
OPTIONAL = {"ray", "onnx", "onnxruntime", "matplotlib", "polars", "pandas", "sklearn", "scipy", "fastapi", "aiohttp"}
LONGEST_FUNCTION = 50


def modules() -> list[Path]:
    """Every module but the package's own namespace, which is lazy and imports for type checkers alone."""
    return sorted(set(SOURCE.rglob("*.py")) - {SOURCE / "__init__.py"})


def room_of(dotted: str) -> str:
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path, *, inside_functions: bool = True) -> set[str]:
    found = set()
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if inside_functions else iter(tree.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | (
                {f"scalarlens.{alias.name}" for alias in node.names} if node.module == "scalarlens" else set()
            )
    return found


def rank(room: str) -> int:
    places = [index for index, group in enumerate(ORDER) if room in group]
    assert places, f"{room} has no place in the order of the house; give it one in ORDER"
    return places[0]


def foreign_imports(room: str, imported: set[str]) -> set[str]:
    """Imports that point to the right, or to another room of the same group beyond what it may know."""
    rooms = {room_of(name) for name in imported if name.split(".")[0] == "scalarlens"}
    return {other for other in rooms - {room, "__init__"} if rank(other) > rank(room)}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_to_the_left(path: Path) -> None:
    relative = path.relative_to(SOURCE)
    room = relative.parts[0].removesuffix(".py")
    assert not foreign_imports(room, imports_of(path))


def test_an_import_to_the_right_is_caught() -> None:
    assert foreign_imports("table", {"scalarlens.model"}) == {"model"}
    assert foreign_imports("encoders", {"scalarlens.training.loop", "numpy"}) == {"training"}
    assert not foreign_imports("model", {"scalarlens.encoders"})


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_functions_fit_on_a_screen(path: Path) -> None:
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno - f.lineno >= LONGEST_FUNCTION}
    assert not long


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_unsafe_is_called(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    attributes = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    assert not names & {"eval", "exec", "__import__", "compile"}
    assert not attributes & {"torch.load", "torch.save", "pickle.load", "pickle.loads", "np.load", "yaml.load"}
    assert not imports_of(path) & {"pickle", "joblib", "dill", "cloudpickle", "marshal", "shelve"}


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in result.stdout.split()}


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_after("import scalarlens") & (OPTIONAL | {"torch", "numpy", "pyarrow"})


def test_training_loads_nothing_optional() -> None:
    assert not loaded_after("import scalarlens.job, scalarlens.experiments") & OPTIONAL


def test_help_does_not_import_torch() -> None:
    code = "import scalarlens.cli\ntry: scalarlens.cli.main(['--help'])\nexcept SystemExit: pass"
    assert "torch" not in loaded_after(code)
