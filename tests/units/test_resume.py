"""A training that was stopped at any moment and resumed ends in the bits of one that never was."""

from __future__ import annotations

import itertools
import json
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from scalarlens import metrics
from scalarlens.cli import main
from scalarlens.datasets.prepared import PreparedTable
from scalarlens.errors import ArtifactError
from scalarlens.model import CtrModel, ModelSpec
from scalarlens.table.batches import PackedSplit
from scalarlens.table.tensorizer import Tensorizer
from scalarlens.training import Recipe, fit, loop
from scalarlens.training.checkpoint import CHECKPOINT_FILE, load_checkpoint, save_checkpoint

Tensors, State = dict[str, Tensor], dict[str, Any]
Damage = Callable[[Tensors, State], None]

KILL_RESUME = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "kill_resume.py")))
ROWS = 900


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small prepared click log."""
    prepared: Path = KILL_RESUME.prepare_table(tmp_path_factory.mktemp("table"), ROWS)
    return prepared


# In one process: stopped after every batch


class Interrupted(Exception):
    pass


class World(NamedTuple):
    tensorizer: Tensorizer
    train: PackedSplit
    valid: PackedSplit


RECIPE = Recipe(
    embedding_dim=4,
    hidden=(8, 4),
    batch_size=150,
    learning_rate=0.02,
    averaging=0.6,
    dropout=0.1,
    plateau_factor=0.5,
    batch_norm=True,
    max_epochs=5,
    patience=4,
)


@pytest.fixture(scope="module")
def world(data: Path) -> World:
    table = PreparedTable(data)
    tensorizer = Tensorizer(table.schema, table.statistics, "raw")
    return World(tensorizer, table.split("train", tensorizer.scale), table.split("valid", tensorizer.scale))


#: the rate is cut, and the best epoch is neither the first nor the last
AUCS = (0.6, 0.7, 0.65, 0.72, 0.71)


class Scripted(loop._Run):
    """A training with the validation AUCs above."""

    def judge(self) -> dict[str, Any]:
        auc = AUCS[min(self.shuffle.epoch, len(AUCS)) - 1]
        with pytest.MonkeyPatch.context() as patch:
            told = SimpleNamespace(auc=lambda *_: auc, log_loss=metrics.log_loss, sigmoid=metrics.sigmoid)
            patch.setattr(loop, "metrics", told)
            return super().judge()


class Bits(NamedTuple):
    weights: bytes
    history: list[dict[str, Any]]
    best_epoch: int


def trained(world: World, folder: Path, *, stop_after: int | None = None, start: int = 1) -> Bits:
    """Train in a folder, with a checkpoint after every batch; stopped at a call of `progress`, if that is wanted."""
    calls = itertools.count(1)

    def progress(*_: Any) -> None:
        if next(calls) == stop_after:
            raise Interrupted

    torch.manual_seed(start)
    spec = ModelSpec("scalarlens", "deepfm", 4, RECIPE.tower, RECIPE.category_std).resolved()
    model = CtrModel.build(spec, world.tensorizer.encoder_statistics)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_Run", Scripted)
        result = fit(
            model, world.train, world.valid, RECIPE, seed=5, folder=folder, checkpoint_seconds=0, progress=progress
        )
    return Bits(save(model.state_dict()), result.history, result.best_epoch)


@pytest.fixture(scope="module")
def undisturbed(world: World, tmp_path_factory: pytest.TempPathFactory) -> Bits:
    bits = trained(world, tmp_path_factory.mktemp("undisturbed"))
    assert [entry["learning_rate"] for entry in bits.history] == [0.02, 0.02, 0.02, 0.01, 0.01]
    assert bits.best_epoch == 4
    return bits


#: five batches and the end of the epoch, five times
CALLS = range(1, 31)


def stopped_and_resumed(world: World, folder: Path, stop_after: int) -> Bits:
    with pytest.raises(Interrupted):
        trained(world, folder, stop_after=stop_after)
    # Whoever resumes has another start and other random numbers behind it.
    return trained(world, folder, start=999)


@pytest.mark.parametrize("stop_after", CALLS)
def test_stopped_after_any_batch(world: World, undisturbed: Bits, tmp_path: Path, stop_after: int) -> None:
    if stop_after == 1:
        with pytest.raises(Interrupted):
            trained(world, tmp_path, stop_after=1)
        assert load_checkpoint(tmp_path) is None, "the first call comes before the first checkpoint"
        assert trained(world, tmp_path) == undisturbed
    else:
        assert stopped_and_resumed(world, tmp_path, stop_after) == undisturbed


def test_stopped_again_and_again(world: World, undisturbed: Bits, tmp_path: Path) -> None:
    """Each attempt gets three calls further, of which one repeats the batch that was in hand."""
    attempts = 0
    for start in itertools.count(1):
        attempts += 1
        try:
            found = trained(world, tmp_path, stop_after=4, start=1 if start == 1 else 100 + start)
            break
        except Interrupted:
            continue
    assert found == undisturbed
    assert attempts >= 8


def test_stopped_between_history_and_checkpoint(
    world: World, undisturbed: Bits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The history is written first, so that it may be an epoch ahead of the checkpoint."""

    def stops_at_the_end_of_an_epoch(folder: Path, tensors: Tensors, state: State) -> None:
        if len(state["history"]) == 3:
            raise Interrupted
        save_checkpoint(folder, tensors, state)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_checkpoint", stops_at_the_end_of_an_epoch)
        with pytest.raises(Interrupted):
            trained(world, tmp_path)
    lines = (tmp_path / loop.HISTORY_FILE).read_text().splitlines()
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert len(lines) == 3 == len(found[1]["history"]) + 1
    assert trained(world, tmp_path, start=999) == undisturbed
    assert [json.loads(line) for line in (tmp_path / loop.HISTORY_FILE).read_text().splitlines()] == undisturbed.history


def test_finished_training_is_not_trained_further(world: World, undisturbed: Bits, tmp_path: Path) -> None:
    assert trained(world, tmp_path) == undisturbed
    before = (tmp_path / CHECKPOINT_FILE).read_bytes()
    assert trained(world, tmp_path, stop_after=1, start=999) == undisturbed
    assert (tmp_path / CHECKPOINT_FILE).read_bytes() == before


# What a checkpoint could forget


def zeroed(prefix: str, suffix: str = "") -> Damage:
    def damage(tensors: Tensors, state: State) -> None:
        for name in tensors:
            if name.startswith(prefix) and name.endswith(suffix):
                tensors[name] = torch.zeros_like(tensors[name])

    return damage


def without_optimizer(tensors: Tensors, state: State) -> None:
    for name in [name for name in tensors if name.startswith("optimizer.")]:
        del tensors[name]


def with_fresh_random_numbers(tensors: Tensors, state: State) -> None:
    tensors["random.cpu"] = torch.get_rng_state()


def with_weights_for(prefix: str) -> Damage:
    """The current weights in place of others."""

    def damage(tensors: Tensors, state: State) -> None:
        for name in tensors:
            if name.startswith(prefix):
                tensors[name] = tensors["model." + name.removeprefix(prefix)].clone()

    return damage


def with_first_rates(tensors: Tensors, state: State) -> None:
    state["rates"] = [RECIPE.learning_rate for _ in state["rates"]]


def with_few_averaged_steps(tensors: Tensors, state: State) -> None:
    state["averaged_steps"] = 1


def at_the_start_of_the_epoch(tensors: Tensors, state: State) -> None:
    state["position"] = {**state["position"], "batch": 0}


def one_batch_on(tensors: Tensors, state: State) -> None:
    state["position"] = {**state["position"], "batch": state["position"]["batch"] + 1}


def without_history(tensors: Tensors, state: State) -> None:
    state["history"] = []


DAMAGES: dict[str, Damage] = {
    "random numbers": with_fresh_random_numbers,
    "optimizer": without_optimizer,
    "optimizer steps": zeroed("optimizer.", ".step"),
    "first moments": zeroed("optimizer.", ".exp_avg"),
    "second moments": zeroed("optimizer.", ".exp_avg_sq"),
    "loss so far": zeroed("loss_sum"),
    "batch norm": zeroed("model.", ".running_mean"),
    "averages": with_weights_for("average."),
    "averaged steps": with_few_averaged_steps,
    "best weights": with_weights_for("best."),
    "learning rates": with_first_rates,
    "batch": at_the_start_of_the_epoch,
    "one batch too far": one_batch_on,
    "history": without_history,
}


@pytest.mark.parametrize("forgotten", DAMAGES)
def test_checkpoint_that_forgets_is_caught(
    world: World, undisturbed: Bits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """Resumed in the middle of the second or of the last epoch, nothing may be missing."""

    def forgetting(folder: Path) -> tuple[Tensors, State] | None:
        found = load_checkpoint(folder)
        if found is not None:
            DAMAGES[forgotten](*found)
        return found

    monkeypatch.setattr(loop, "load_checkpoint", forgetting)
    moments = (9, 27)
    assert any(stopped_and_resumed(world, tmp_path / str(moment), moment) != undisturbed for moment in moments)


# From the command line


def command(data: Path, out: Path, *more: str) -> list[str]:
    """Two short epochs."""
    base: list[str] = KILL_RESUME.Training(data, out).command(*more)
    at = base.index("recipe.max_epochs=10")
    return [*base[:at], "recipe.max_epochs=2", *base[at + 1 :]]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outcome(folder: Path) -> dict[str, bytes]:
    """All that must not depend on interruptions: everything but the seconds that epochs took."""
    return {name: content for name, content in files_of(folder).items() if name != "timings.jsonl"}


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, not to be written to."""
    out: Path = tmp_path_factory.mktemp("runs") / "finished"
    assert main(command(data, out)) == 0
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run folder."""
    for name, content in files_of(finished).items():
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_bytes(content)
    return tmp_path / "run"


def test_training_opens_no_test_rows(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    split = PreparedTable.split

    def noted(table: PreparedTable, name: str, *rest: Any) -> PackedSplit:
        opened.append(name)
        return split(table, name, *rest)

    monkeypatch.setattr(PreparedTable, "split", noted)
    assert "test" in PreparedTable(data).splits
    assert main(command(data, tmp_path / "run")) == 0
    assert sorted(opened) == ["train", "valid"]


def test_resume_without_a_folder_begins(data: Path, finished: Path, tmp_path: Path) -> None:
    assert main(command(data, tmp_path / "run", "--resume")) == 0
    assert outcome(tmp_path / "run") == outcome(finished)


def test_resume_without_a_checkpoint_begins(data: Path, finished: Path, run: Path) -> None:
    for name in files_of(run):
        if name != "run.json":
            (run / name).unlink()
    (run / "artifact").rmdir()
    assert main(command(data, run, "--resume")) == 0
    assert outcome(run) == outcome(finished)


def test_other_seed_ends_in_other_bits(data: Path, finished: Path, tmp_path: Path) -> None:
    """What is compared here does tell two trainings apart."""
    arguments = command(data, tmp_path / "run")
    arguments[arguments.index("2026")] = "2027"
    assert main(arguments) == 0
    mine, theirs = outcome(tmp_path / "run"), outcome(finished)
    for name in ("history.jsonl", "artifact/model.safetensors", "artifact/metrics.json", CHECKPOINT_FILE):
        assert mine[name] != theirs[name]
    assert KILL_RESUME.Training(data, tmp_path / "run").bits() != KILL_RESUME.Training(data, finished).bits()


def test_existing_run_is_not_overwritten(
    data: Path, finished: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(data, run)) == 2
    assert "already holds a run; continue it with --resume" in capsys.readouterr().err
    assert files_of(run) == files_of(finished)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--option", "recipe.learning_rate=0.5"], "recipe.learning_rate"),
        (["--seed", "7"], "seed"),
        (["--input-scale", "zscore"], "input_scale"),
        (["--encoder", "deer"], "model.encoder"),
        (["--option", "encoder.rank=3"], "model.encoder_options.rank"),
        (["--option", "recipe.dropout=0.3"], "model.tower.dropout, recipe.dropout"),
    ],
)
def test_resume_with_other_options_is_refused(
    data: Path, finished: Path, run: Path, capsys: pytest.CaptureFixture[str], changed: list[str], named: str
) -> None:
    arguments = command(data, run, "--resume")
    flag, value = changed
    prefix = value.partition("=")[0] + "="
    if flag == "--option":
        kept = [i for i, argument in enumerate(arguments) if not argument.startswith(prefix)]
        arguments = [arguments[i] for i in kept if arguments[i] != "--option" or i + 1 in kept] + changed
    else:
        arguments[arguments.index(flag) + 1] = value
    assert main(arguments) == 2
    complaint = capsys.readouterr().err
    assert named in complaint
    assert complaint.count("\n") == 1
    assert files_of(run) == files_of(finished)


def test_resume_on_other_rows_is_refused(
    finished: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    other = KILL_RESUME.prepare_table(tmp_path / "other", ROWS + 1)
    assert main(command(other, run, "--resume")) == 2
    assert "holds a run with another data; " in capsys.readouterr().err
    assert files_of(run) == files_of(finished)


def test_resume_of_a_finished_run_leaves_the_same_bytes(data: Path, finished: Path, run: Path) -> None:
    assert main(command(data, run, "--resume")) == 0
    assert files_of(run) == files_of(finished)


def test_resume_makes_a_lost_artifact_again(data: Path, finished: Path, run: Path) -> None:
    for path in (run / "artifact").iterdir():
        path.unlink()
    (run / "artifact").rmdir()
    assert main(command(data, run, "--resume")) == 0
    assert outcome(run) == outcome(finished)


def changed_in_the_middle(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:5],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        changed_in_the_middle,
        lambda content: content.replace(b'\\"batch\\": 0', b'\\"batch\\": 1'),
    ],
    ids=["empty", "header cut", "half", "last byte lost", "a byte more", "a bit changed", "position changed"],
)
def test_damaged_checkpoint_is_refused_in_one_sentence(
    data: Path, run: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[bytes], bytes]
) -> None:
    checkpoint = run / CHECKPOINT_FILE
    damaged = damage(checkpoint.read_bytes())
    assert damaged != checkpoint.read_bytes()
    checkpoint.write_bytes(damaged)
    before = files_of(run)
    assert main(command(data, run, "--resume")) == 4
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"scalarlens: {checkpoint} is not an intact checkpoint: ")
    assert complaint.count("\n") == 1
    assert files_of(run) == before


def test_checkpoint_of_a_gpu_resumes_without_one(
    world: World, undisturbed: Bits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of a generator that is not there is left alone."""

    def with_gpu_state(folder: Path) -> tuple[Tensors, State] | None:
        found = load_checkpoint(folder)
        if found is not None:
            found[0]["random.cuda"] = torch.zeros(16, dtype=torch.uint8)
        return found

    monkeypatch.setattr(loop, "load_checkpoint", with_gpu_state)
    assert stopped_and_resumed(world, tmp_path, 9) == undisturbed


def test_diverged_run_leaves_no_artifact(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(data, tmp_path / "run")
    arguments[arguments.index("recipe.learning_rate=0.01")] = "recipe.learning_rate=1e35"
    assert main(arguments) == 1
    assert "training diverged" in capsys.readouterr().err
    assert not (tmp_path / "run" / "artifact").exists()
    assert main([*arguments, "--resume"]) == 1
    assert not (tmp_path / "run" / "artifact").exists()


def test_events_do_not_make_a_fresh_folder_foreign(
    data: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--tensorboard` writes into the run folder, which must be the run's by then."""
    told: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            Path(folder).mkdir(parents=True)

        def add_scalar(self, name: str, value: float, epoch: int) -> None:
            told.append((name, value, epoch))

        def close(self) -> None:
            told.append(("closed", 0.0, 0))

    module = ModuleType("torch.utils.tensorboard")
    vars(module)["SummaryWriter"] = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    assert main(command(data, tmp_path / "run", "--tensorboard")) == 0
    assert outcome(tmp_path / "run") == outcome(finished)
    history = [json.loads(line) for line in (finished / "history.jsonl").read_text().splitlines()]
    assert [entry["valid_auc"] for entry in history] == [value for name, value, _ in told if name == "valid_auc"]
    assert told[-1][0] == "closed"


# In a process of its own, killed


class Moments:
    """Random moments at which to kill a training, by what it is doing."""

    def __init__(self, training: Any, seconds: float, epochs: int) -> None:
        self.training, self.seconds, self.epochs = training, seconds, epochs
        self.chance = random.Random(2026)

    def while_starting(self) -> Callable[[float], bool]:
        delay = self.chance.uniform(0.0, 0.3 * self.seconds)
        return lambda seconds: seconds >= delay

    def while_training(self) -> Callable[[float], bool]:
        """A random time after a random number of epochs."""
        epochs, delay = self.chance.randrange(0, self.epochs - 1), self.chance.uniform(0.0, 0.03)
        reached: list[float] = []

        def moment(seconds: float) -> bool:
            begun = (self.training.out / CHECKPOINT_FILE).exists()
            if begun and not reached and len(self.training.history()) >= epochs:
                reached.append(seconds)
            return bool(reached) and seconds - reached[0] >= delay

        return moment

    def while_sealing(self) -> Callable[[float], bool]:
        """As soon as the artifact is being written, or has just been."""
        places = [self.training.out / name for name in (".artifact.partial", "artifact")]
        return lambda seconds: any(place.exists() for place in places)


def test_killed_three_times_and_resumed(data: Path, tmp_path: Path) -> None:
    whole, training = (KILL_RESUME.Training(data, tmp_path / name) for name in ("whole", "killed"))
    moments = Moments(training, whole.finish(), len(whole.history()))
    ended = "the training ended before it was killed"
    assert training.kill(moments.while_starting()), ended
    assert training.kill(moments.while_training(), "--resume"), ended
    assert load_checkpoint(training.out) is not None
    assert len(training.history()) < len(whole.history())
    assert training.kill(moments.while_sealing(), "--resume"), ended
    training.finish("--resume")
    assert training.bits() == whole.bits()


def test_cut_file_raises_what_the_command_line_reports(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"weights": torch.ones(3)}, {"position": 1})
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found[0]["weights"].tolist() == [1.0, 1.0, 1.0]
    assert found[1] == {"position": 1}
    path = tmp_path / CHECKPOINT_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"is not an intact checkpoint: .*; start again in another folder"):
        load_checkpoint(tmp_path)
