"""The command line. Each command imports what it needs when it runs, so that `--help` is immediate."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import scalarlens
from scalarlens.errors import ScalarLensError, UsageError, unknown_name

if TYPE_CHECKING:
    from scalarlens.datasets.source import Opened
    from scalarlens.job import Job
    from scalarlens.training import Recipe

EPILOG = "exit codes: 0 ok, 1 a check failed, 2 wrong usage, 3 data breaks its contract, 4 artifact refused"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake ends in one sentence and an exit code, never in a traceback."""
    parser = build_parser()
    chosen = parser.parse_args(arguments)
    try:
        chosen.run(chosen)
    except ScalarLensError as error:
        print(f"scalarlens: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        print(f"scalarlens: {error.strerror or error}: {error.filename or ''}".rstrip(": "), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scalarlens: interrupted", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scalarlens", description=scalarlens.__doc__, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"scalarlens {scalarlens.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        _add_demo,
        _add_schema,
        _add_prepare,
        _add_train,
        _add_evaluate,
        _add_predict,
        _add_audit,
        _add_artifact,
        _add_runs,
        _add_list,
    ):
        add(commands)
    return parser


def _command(commands: Any, name: str, run: Any, summary: str, *, quiet: bool = False, machine: bool = False) -> Any:
    parser = commands.add_parser(name, help=summary, description=summary, epilog=EPILOG)
    parser.set_defaults(run=run, quiet=False, json=False)
    if quiet:
        parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    if machine:
        parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _device_option(parser: Any) -> None:
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, ensure_ascii=False, allow_nan=False))


def _note(text: str) -> None:
    print(f"scalarlens: {text}", file=sys.stderr)


# demo


def _add_demo(commands: Any) -> None:
    parser = _command(
        commands, "demo", _demo, "train ScalarLens and DEER on a made click log", quiet=True, machine=True
    )
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=2026)
    _device_option(parser)


def _demo(chosen: argparse.Namespace) -> None:
    from scalarlens.demo import run_demo
    from scalarlens.job import choose_device
    from scalarlens.progress import Reporter

    summary = run_demo(
        chosen.out,
        rows=chosen.rows,
        seed=chosen.seed,
        device=choose_device(chosen.device),
        reporter=Reporter(chosen.quiet),
    )
    if chosen.json:
        _print_json(summary.document)
    else:
        print(summary.text)


# schema


def _add_schema(commands: Any) -> None:
    schema = commands.add_parser("schema", help="describe a table", epilog=EPILOG)
    actions = schema.add_subparsers(required=True, metavar="ACTION")
    infer = _command(actions, "infer", _schema_infer, "write a schema for a table to stdout, with reasons")
    infer.add_argument("table", type=Path, help=".csv, .tsv, .parquet, .arrow, or a folder of them")
    infer.add_argument("--label", required=True)
    infer.add_argument("--group")
    infer.add_argument("--time")
    check = _command(actions, "check", _schema_check, "hold a table against a schema", machine=True)
    check.add_argument("schema", type=Path)
    check.add_argument("table", type=Path)


def _schema_infer(chosen: argparse.Namespace) -> None:
    from scalarlens.datasets.files import open_table
    from scalarlens.datasets.infer import infer_schema

    inferred = infer_schema(open_table(chosen.table), chosen.label, group=chosen.group, time=chosen.time)
    print(inferred.to_toml(), end="")


def _schema_check(chosen: argparse.Namespace) -> None:
    from scalarlens.datasets.check import check_table
    from scalarlens.datasets.files import open_table
    from scalarlens.errors import DataError
    from scalarlens.table.schema import Schema

    problems = check_table(Schema.read(chosen.schema), open_table(chosen.table))
    errors = [problem for problem in problems if problem.severity == "error"]
    if chosen.json:
        _print_json({"errors": len(errors), "problems": [vars(problem) for problem in problems]})
    else:
        for problem in problems:
            print(problem)
        if not problems:
            print(f"{chosen.table} fits {chosen.schema}")
    if errors:
        raise DataError(f"{chosen.table} breaks {chosen.schema} in {len(errors)} way{'s' * (len(errors) > 1)}")


# prepare


def _add_prepare(commands: Any) -> None:
    parser = _command(commands, "prepare", _prepare, "pack a table for training", quiet=True, machine=True)
    named = parser.add_argument_group("a known source")
    named.add_argument("--source", metavar="NAME", help="`scalarlens list datasets` says what each expects")
    named.add_argument("--from", dest="place", type=Path, metavar="PATH", help="its file, or the folder of its files")
    named.add_argument("--rows", type=int, metavar="N", help="how many to make, where a source is made")
    named.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="source.NAME=VALUE",
        help="an option of the source; may be repeated",
    )
    own = parser.add_argument_group("tables of your own")
    own.add_argument("--schema", type=Path, help="by default, schema.toml in the folder that --train names")
    own.add_argument("--train", type=Path)
    own.add_argument("--valid", type=Path)
    own.add_argument("--test", type=Path)
    parser.add_argument("--split", choices=("random", "time", "official"), help="random divides 80/10/10, with --seed")
    parser.add_argument("--seed", type=int, help="draws the random split, and shuffles its rows as a whole")
    parser.add_argument("--memory-limit", default="2GB", metavar="SIZE", help="such as 1500MB or 2GB, or GiB")
    parser.add_argument(
        "--engine",
        default="local",
        choices=("local", "ray"),
        help="ray reads on a Ray cluster (RAY_ADDRESS, or this machine), which must reach the table and --out",
    )
    parser.add_argument("--out", type=Path, required=True)


def _prepare(chosen: argparse.Namespace) -> None:
    from scalarlens.datasets.parts import SPLITS
    from scalarlens.datasets.prepare import parse_bytes, prepare
    from scalarlens.progress import StageReporter

    memory_limit = parse_bytes(chosen.memory_limit, "--memory-limit")
    opened = _open_tables(chosen) if chosen.source is None else _open_source(chosen)
    for note in opened.notes:
        _note(note)
    with StageReporter(chosen.quiet) as reporter:
        prepared = prepare(
            opened.schema,
            opened.parts,
            chosen.out,
            opened.origin,
            shuffle_seed=opened.origin.get("seed"),
            memory_limit=memory_limit,
            engine=chosen.engine,
            progress=reporter.progress,
        )
    rows = {name: prepared.splits[name]["rows"] for name in SPLITS if name in prepared.splits}
    if chosen.json:
        digests = {"digest": prepared.digest, "training_digest": prepared.training_digest}
        _print_json({"rows": rows, **digests, "notes": list(opened.notes)})
    else:
        print(f"{chosen.out}: " + ", ".join(f"{name} {count:,} rows" for name, count in rows.items()))


def _open_source(chosen: argparse.Namespace) -> Opened:
    from scalarlens.datasets.source import build, sources

    given = [f"--{name}" for name in ("schema", "train", "valid", "test") if getattr(chosen, name) is not None]
    if given:
        raise UsageError(f"--source {chosen.source} brings its own schema and files; leave out {', '.join(given)}")
    part = sources.get(chosen.source)
    options = parse_options(chosen.option, parts=("source",))["source"]
    if chosen.rows is not None:
        if "rows" in options:
            raise UsageError("--rows and --option source.rows say the same; give one of them")
        options["rows"] = chosen.rows
    rule = part.split_rule(chosen.split)
    if chosen.seed is not None and not rule.seeded:
        _note(f"the {rule.name} split of {chosen.source} draws nothing, so that --seed changes nothing")
    if chosen.place is not None and not part.files:
        _note(f"{chosen.source} is made, not read, so that --from changes nothing")
    return build(chosen.source, **options).open(chosen.place, chosen.split, chosen.seed)


def _open_tables(chosen: argparse.Namespace) -> Opened:
    from scalarlens.datasets.files import open_table
    from scalarlens.datasets.parts import Part, deal_randomly
    from scalarlens.datasets.source import Opened
    from scalarlens.table.schema import Schema

    _require_own_tables(chosen)
    if (chosen.split is None) != (chosen.seed is None):
        raise UsageError("--split random and --seed N go together: a split that cannot be repeated is refused")
    if chosen.split is None and chosen.valid is None:
        raise UsageError("training needs a validation split: give --valid FILE, or --split random --seed N")
    schema = Schema.read(chosen.schema or chosen.train / "schema.toml")
    paths = {name: getattr(chosen, name) for name in ("train", "valid", "test")}
    tables = {name: open_table(path) for name, path in paths.items() if path is not None}
    notes = []
    for name, table in tables.items():
        extra = [column for column in table.columns if column not in schema.columns]
        if extra:
            notes.append(
                f"{name}: ignoring {len(extra)} column{'s' * (len(extra) > 1)} outside the schema: {', '.join(extra)}"
            )
    if chosen.split is None:
        parts = [Part(table, name) for name, table in tables.items()]
    elif len(tables) > 1:
        raise UsageError("--split random divides one table; give --train alone, or the splits without --split")
    else:
        parts = [Part(tables["train"], deal_randomly(tables["train"].count_rows(), chosen.seed))]
    return Opened(schema, tuple(parts), tuple(notes), {"split": chosen.split, "seed": chosen.seed, "notes": notes})


def _require_own_tables(chosen: argparse.Namespace) -> None:
    """Tables of one's own: what they need, and what belongs to sources alone."""
    only = {"--from": chosen.place, "--rows": chosen.rows, "--option": chosen.option or None}
    given = [name for name, value in only.items() if value is not None]
    if given:
        raise UsageError(f"{given[0]} belongs to a source; add --source NAME (`scalarlens list datasets`)")
    if chosen.train is None:
        raise UsageError("nothing to prepare: give --source NAME --from PATH, or --schema FILE --train FILE")
    if chosen.schema is None and not chosen.train.is_dir():
        raise UsageError(f"{chosen.train} needs a schema: give --schema FILE; `scalarlens schema infer` writes one")
    if chosen.split not in (None, "random"):
        raise UsageError(f"--split {chosen.split} belongs to a source; tables of your own take --split random")


# train


def _add_train(commands: Any) -> None:
    parser = _command(commands, "train", _train, "train a model on a prepared table", quiet=True, machine=True)
    parser.add_argument("data", type=Path, help="a folder that `scalarlens prepare` wrote")
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--input-scale", required=True, choices=("raw", "zscore"))
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="paper", help="paper or bars")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="PART.NAME=VALUE",
        help="encoder.rank=8, backbone.cross_layers=2, recipe.averaging=0.99, ...; may be repeated",
    )
    parser.add_argument("--resume", action="store_true", help="continue what --out holds of this run")
    parser.add_argument(
        "--checkpoint-seconds", type=float, metavar="N", help="time between checkpoints; 0 writes one after every batch"
    )
    parser.add_argument("--tensorboard", action="store_true", help="also write TensorBoard events under --out")
    _device_option(parser)


def _train(chosen: argparse.Namespace) -> None:
    from scalarlens.job import choose_device, train
    from scalarlens.progress import Reporter

    job, device = _job(chosen), choose_device(chosen.device)
    every = {} if chosen.checkpoint_seconds is None else {"checkpoint_seconds": chosen.checkpoint_seconds}
    with Reporter(chosen.quiet, folder=chosen.out, tensorboard=chosen.tensorboard) as reporter:
        artifact = train(job, chosen.out, device=device, resume=chosen.resume, progress=reporter.progress, **every)
    if chosen.json:
        _print_json({"artifact": str(chosen.out / "artifact"), **artifact.metrics})
    else:
        found = artifact.metrics
        print(
            f"{chosen.out / 'artifact'}: best epoch {found['best_epoch']} of {found['epochs']}, "
            f"validation AUC {found['valid_auc']:.5f}, log loss {found['valid_log_loss']:.5f}"
        )


def _job(chosen: argparse.Namespace) -> Job:
    from scalarlens.job import Job
    from scalarlens.model import ModelSpec

    options = parse_options(chosen.option)
    recipe = named_recipe(chosen.recipe, options["recipe"])
    spec = ModelSpec(
        chosen.encoder,
        chosen.backbone,
        recipe.embedding_dim,
        recipe.tower,
        recipe.category_std,
        options["encoder"],
        options["backbone"],
    ).resolved()
    return Job(chosen.data, spec, recipe, chosen.input_scale, chosen.seed)


def named_recipe(name: str, changes: dict[str, Any]) -> Recipe:
    """A recipe by name, with single values changed."""
    from scalarlens.registry import fit_option
    from scalarlens.training import RECIPES

    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    recipe = RECIPES[name]
    for key in changes:
        if key not in vars(recipe):
            raise unknown_name("option of recipe", key, vars(recipe))
    return replace(
        recipe, **{key: fit_option(f"recipe.{key}", vars(recipe)[key], value) for key, value in changes.items()}
    )


def parse_options(
    texts: Sequence[str], parts: Sequence[str] = ("encoder", "backbone", "recipe")
) -> dict[str, dict[str, Any]]:
    """`PART.NAME=VALUE` texts by part; values are read as JSON where they are JSON, else as text.

    >>> parse_options(["encoder.rank=8", "encoder.mesh_start=uniform"])["encoder"]
    {'rank': 8, 'mesh_start': 'uniform'}
    """
    options: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for text in texts:
        path, equals, value = text.partition("=")
        part, dot, name = path.partition(".")
        if not (equals and dot and name):
            raise UsageError(f"--option takes PART.NAME=VALUE, such as {parts[0]}.rank=8; got {text!r}")
        if part not in options:
            raise unknown_name("part in --option", part, options)
        if name in options[part]:
            raise UsageError(f"--option {path} is given twice")
        try:
            options[part][name] = json.loads(value)
        except ValueError:
            options[part][name] = value
    return options


# evaluate and predict


def _add_evaluate(commands: Any) -> None:
    parser = _command(commands, "evaluate", _evaluate, "measure an artifact on a prepared split", machine=True)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--split", default="test")
    _device_option(parser)


def _evaluate(chosen: argparse.Namespace) -> None:
    from scalarlens.artifact import load
    from scalarlens.datasets.prepared import PreparedTable
    from scalarlens.errors import DataError
    from scalarlens.job import choose_device, evaluate

    device = choose_device(chosen.device)
    artifact, table = load(chosen.artifact).to(device), PreparedTable(chosen.data)
    if table.statistics.digest() != artifact.contract["statistics_digest"]:
        raise DataError(
            f"{chosen.data} was prepared with other training rows than {chosen.artifact} was trained on, so its "
            "category ids mean something else; score its rows with `scalarlens predict`"
        )
    found = evaluate(artifact.model, table.split(chosen.split, artifact.tensorizer.scale).to(device))
    if chosen.json:
        _print_json(found)
    else:
        for name, value in found.items():
            print(f"{name:18} {'not defined' if value is None else f'{value:,.6g}'}")


def _add_predict(commands: Any) -> None:
    parser = _command(commands, "predict", _predict, "score raw rows", quiet=True)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("rows", type=Path, help=".csv, .tsv, .parquet, .arrow, or a folder of them")
    parser.add_argument("--out", type=Path, required=True, help=".parquet, .arrow or .csv")
    _device_option(parser)


def _predict(chosen: argparse.Namespace) -> None:
    from scalarlens.artifact import load
    from scalarlens.datasets.files import open_table
    from scalarlens.job import choose_device
    from scalarlens.scoring import predict_file

    artifact = load(chosen.artifact).to(choose_device(chosen.device))
    table = open_table(chosen.rows)
    extra = [column for column in table.columns if column not in artifact.schema.features]
    if extra:
        _note(f"ignoring {len(extra)} column{'s' * (len(extra) > 1)} outside the contract: {', '.join(extra)}")
    counts = predict_file(artifact, table, chosen.out)
    if not chosen.quiet:
        for kind in ("missing", "unseen", "out_of_range", "infinite"):
            for column, count in sorted(getattr(counts, kind).items()):
                _note(f"{column}: {count:,} of {counts.rows:,} cells {kind.replace('_', ' ')}")
        print(f"{chosen.out}: {counts.rows:,} rows")


# audit


def _add_audit(commands: Any) -> None:
    parser = _command(commands, "audit", _audit, "put questions to a trained artifact", machine=True)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("data", type=Path, help="a folder that `scalarlens prepare` wrote, or a file of raw rows")
    parser.add_argument("--split", help="which split of a prepared folder; by default valid")
    parser.add_argument("--rows", type=int, metavar="N", help="how many rows, spread evenly; by default 10,000")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one audit; may be repeated")
    _device_option(parser)


def _audit(chosen: argparse.Namespace) -> None:
    from scalarlens.artifact import load
    from scalarlens.audits import audits, open_subject, run_audits
    from scalarlens.errors import CheckFailed
    from scalarlens.job import choose_device

    for name in chosen.only:
        audits.get(name)
    artifact = load(chosen.artifact).to(choose_device(chosen.device))
    options = {"split": chosen.split, "rows": chosen.rows}
    subject = open_subject(artifact, chosen.data, **{k: v for k, v in options.items() if v is not None})
    if subject.packed is None and chosen.split is not None:
        _note(f"{chosen.data} is a file of raw rows, so that --split changes nothing")
    reports = run_audits(subject, chosen.only)
    failed = [report.name for report in reports if report.finding.passed is False]
    if chosen.json:
        head = {"artifact": str(chosen.artifact), "encoder": subject.encoder_name, "rows": len(subject.values)}
        _print_json({**head, "passed": not failed, "audits": [report.to_tables() for report in reports]})
    else:
        print(f"{chosen.artifact}, encoder {subject.encoder_name}, {len(subject.values):,} rows of {chosen.data}")
        print("\n".join(map(str, reports)))
    if failed:
        raise CheckFailed(f"{chosen.artifact} fails {', '.join(failed)}")


# artifact


def _add_artifact(commands: Any) -> None:
    contract = commands.add_parser("contract", help="the raw-unit contract of an artifact", epilog=EPILOG)
    actions = contract.add_subparsers(required=True, metavar="ACTION")
    show = _command(actions, "show", _contract_show, "print the contract of an artifact", machine=True)
    show.add_argument("artifact", type=Path)
    verify = _command(commands, "verify", _verify, "check that an artifact is intact and consistent", machine=True)
    verify.add_argument("artifact", type=Path)


def _contract_show(chosen: argparse.Namespace) -> None:
    from scalarlens.artifact import load
    from scalarlens.contract import show_contract

    contract = load(chosen.artifact).contract
    if chosen.json:
        _print_json(contract)
    else:
        print(show_contract(contract))


def _verify(chosen: argparse.Namespace) -> None:
    from scalarlens.artifact import FILES, load

    artifact = load(chosen.artifact)
    if chosen.json:
        _print_json({"artifact": str(chosen.artifact), "intact": True, "files": list(FILES)})
    else:
        fields, encoder = len(artifact.contract["fields"]), artifact.spec["model"]["encoder"]
        print(f"{chosen.artifact} is intact: {len(FILES)} files, {fields} fields, encoder {encoder}")


# runs


def _add_runs(commands: Any) -> None:
    runs = commands.add_parser("runs", help="stores of run records", epilog=EPILOG)
    actions = runs.add_subparsers(required=True, metavar="ACTION")
    merge = _command(actions, "merge", _runs_merge, "join stores, such as those of several machines", machine=True)
    merge.add_argument("stores", type=Path, nargs="+", metavar="STORE")
    merge.add_argument("--into", type=Path, required=True, metavar="STORE", help="may hold records already")


def _runs_merge(chosen: argparse.Namespace) -> None:
    from scalarlens.experiments.store import merge

    found = merge(chosen.stores, chosen.into)
    if chosen.json:
        _print_json(found)
    else:
        print(f"{chosen.into}: {found['records']:,} records, {found['failed']:,} of them of failed runs")


# list


def _add_list(commands: Any) -> None:
    parser = _command(commands, "list", _list, "what exists", machine=True)
    parser.add_argument("kind", choices=("encoders", "backbones", "datasets"))
    parser.add_argument("--values", type=int, default=13, help="numerical fields that parameters are counted for")
    parser.add_argument("--categories", type=int, default=26, help="categorical fields, likewise")
    parser.add_argument("--embedding-dim", type=int, default=16)


def _list(chosen: argparse.Namespace) -> None:
    from scalarlens.catalogue import catalogue, show_catalogue

    if min(chosen.values, chosen.embedding_dim) < 1 or chosen.categories < 0:
        raise UsageError("--values and --embedding-dim start at 1, --categories at 0")
    found = catalogue(chosen.kind, chosen.values, chosen.categories, chosen.embedding_dim)
    if chosen.json:
        _print_json(found)
    else:
        print(show_catalogue(chosen.kind, found))


if __name__ == "__main__":
    sys.exit(main())
