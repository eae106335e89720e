"""A training at one moment, as one file that is replaced atomically: tensors in safetensors, the rest as JSON."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from scalarlens.errors import ArtifactError
from scalarlens.storage import replacing

CHECKPOINT_FILE = "checkpoint.safetensors"


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    content = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps(state)
    with replacing(folder / CHECKPOINT_FILE) as partial:
        # One entry, because safetensors writes several in no fixed order.
        partial.write_bytes(save(content, {"state": f"{_digest(content, text)} {text}"}))


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and state of the newest checkpoint, or None where there is none yet."""
    path = folder / CHECKPOINT_FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            promised, _, text = file.metadata()["state"].partition(" ")
        if _digest(tensors, text) != promised:
            raise ValueError("its content does not have the digest it was written with")
        return tensors, json.loads(text)
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
        raise ArtifactError(f"{path} is not an intact checkpoint: {error}; start again in another folder") from error


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    sha = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        sha.update(f"\n{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        sha.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def flatten_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"optimizer.{i}.{key}": tensor for i, entry in state.items() for key, tensor in entry.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], rates: list[float]) -> None:
    """Put moments, step counts and learning rates back."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in under("optimizer.", tensors).items():
        index, key = name.split(".")
        state.setdefault(int(index), {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
