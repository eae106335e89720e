"""What a machine has to compute with: its cores, and Ray, which makes many machines one."""

from __future__ import annotations

import os
from typing import Any

from scalarlens.errors import MissingExtra


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def import_ray(purpose: str) -> Any:
    """Ray, or the sentence that says how to get it."""
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray", purpose) from None
    return ray


def ensure_ray(ray: Any, **on_this_machine: Any) -> bool:
    """Use the session that runs, join the cluster that RAY_ADDRESS names, or start Ray on this machine alone.

    Returns whether a session was begun here, which is then to be shut down here.
    """
    if ray.is_initialized():
        return False
    start: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if not os.environ.get("RAY_ADDRESS"):
        start |= {"address": "local", "include_dashboard": False, **on_this_machine}
    ray.init(**start)
    return True
