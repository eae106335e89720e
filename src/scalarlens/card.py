"""The model card: Markdown written from facts that the artifact holds, and from nothing else."""

from __future__ import annotations

from typing import Any


def model_card(spec: dict[str, Any], contract: dict[str, Any], metrics: dict[str, Any]) -> str:
    model, training = spec["model"], spec["training"]
    numeric = [entry for entry in contract["fields"] if entry["kind"] == "numeric"]
    categorical = [entry for entry in contract["fields"] if entry["kind"] == "categorical"]
    lines = [
        f"# {model['encoder']} on {model['backbone']}",
        "",
        f"Predicts the probability that `{contract['schema']['label']}` is 1, from {len(numeric)} numerical and "
        f"{len(categorical)} categorical columns in the units that they are served in.",
        "",
        "| fact | value |",
        "|---|---|",
        f"| encoder | `{model['encoder']}` {_options(model['encoder_options'])} |",
        f"| backbone | `{model['backbone']}` {_options(model['backbone_options'])} |",
        f"| input scale | {spec['input_scale']} |",
        f"| seed | {training['seed']} |",
        f"| recipe | {_options(training['recipe'])} |",
        f"| training rows | {contract['training_rows']:,} |",
        f"| training digest | `{contract['training_digest']}` |",
        *(f"| {name.replace('_', ' ')} | {_number(value)} |" for name, value in metrics.items()),
        "",
        "## Fields",
        "",
        "| field | unit | training range | missing in training |",
        "|---|---|---|---|",
        *(f"| {_cell(e['name'])} | {_cell(e['unit'])} | {_range(e)} | {e['missing_rate']:.2%} |" for e in numeric),
        *(f"| {_cell(e['name'])} | | {e['categories']:,} categories | {e['missing_rate']:.2%} |" for e in categorical),
        "",
        "## Limits",
        "",
        "- The contract checks names, kinds and ranges. A wrong column with a plausible range passes.",
        "- A value outside its training range is scored and counted, not refused.",
        "- The metrics above are those of the validation split, which also chose the epoch.",
        "",
    ]
    return "\n".join(lines)


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items())


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _range(entry: dict[str, Any]) -> str:
    if entry["training_range"] is None:
        return "no value in training"
    low, high = entry["training_range"]
    return f"{low:.9g} to {high:.9g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
