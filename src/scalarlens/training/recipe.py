"""The frozen protocol, as one dataclass; and the named sets of values that have a source."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalarlens.backbones import Tower
from scalarlens.encoders.base import TABLE_STD
from scalarlens.errors import UsageError


@dataclass(frozen=True)
class Recipe(Tower):
    """Everything about a training that is neither the encoder nor the data; the defaults are the paper's.

    NOTE[DIFF] The paper states neither the largest number of epochs nor how often it validates: once per epoch.

    `averaging` is the decay of an exponential moving average of the weights, which is then what is validated and
    kept; `embedding_l2` penalises the categorical tables; `plateau_factor` multiplies the learning rate after each
    epoch without a better validation AUC; `category_std` is the start of the categorical tables.
    """

    embedding_dim: int = 16
    category_std: float = TABLE_STD
    batch_size: int = 4096
    learning_rate: float = 1e-3
    patience: int = 2
    max_epochs: int = 50
    averaging: float = 0.0
    embedding_l2: float = 0.0
    plateau_factor: float = 1.0

    def __post_init__(self) -> None:
        bounds = {
            "finite and above 0": lambda x: 0 < x < math.inf,
            "finite and 0 or more": lambda x: 0 <= x < math.inf,
            "in [0, 1)": lambda x: 0 <= x < 1,
            "in (0, 1]": lambda x: 0 < x <= 1,
            "widths above 0": lambda widths: all(width > 0 for width in widths),
        }
        wanted = {
            **dict.fromkeys(
                ("embedding_dim", "batch_size", "learning_rate", "patience", "max_epochs"), "finite and above 0"
            ),
            **dict.fromkeys(("embedding_l2", "category_std"), "finite and 0 or more"),
            **dict.fromkeys(("averaging", "dropout"), "in [0, 1)"),
            "plateau_factor": "in (0, 1]",
            "hidden": "widths above 0",
        }
        values = vars(self)
        broken = [
            f"{key} must be {rule}; got {values[key]!r}"
            for key, rule in wanted.items()
            if not bounds[rule](values[key])
        ]
        if self.batch_norm and self.batch_size == 1:
            broken.append("batch_norm needs a batch_size above 1, for it divides by the deviation of a batch")
        if broken:
            raise UsageError("recipe: " + "; ".join(broken))

    @property
    def tower(self) -> Tower:
        return Tower(self.hidden, self.dropout, self.batch_norm)


RECIPES = {
    "paper": Recipe(),
    # How the BARS benchmark trains DCNv2 on Criteo (DCNv2_criteo_x4_001).
    "bars": Recipe(
        hidden=(1000,) * 5,
        dropout=0.1,
        batch_norm=True,
        batch_size=10_000,
        max_epochs=100,
        embedding_l2=1e-5,
        plateau_factor=0.1,
    ),
}
