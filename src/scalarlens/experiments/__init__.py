"""Experiments: run specifications, records, stores, runners and significance; no table of the paper is known here."""

from scalarlens.experiments.execute import Execution, SharedTables, execute
from scalarlens.experiments.runners import Event, run
from scalarlens.experiments.spec import PROTOCOL, RunRecord, RunSpec
from scalarlens.experiments.store import Requested, RunStore, merge

__all__ = [
    "PROTOCOL",
    "Event",
    "Execution",
    "Requested",
    "RunRecord",
    "RunSpec",
    "RunStore",
    "SharedTables",
    "execute",
    "merge",
    "run",
]
