"""CtrModel: look up categories, encode numbers, hand both to the backbone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalarlens import backbones, encoders
from scalarlens.backbones import Backbone, Tower
from scalarlens.encoders import NumericalEncoder
from scalarlens.encoders.base import TABLE_STD
from scalarlens.registry import bind_options
from scalarlens.table.batches import Batch
from scalarlens.table.statistics import TrainingStatistics, Vocabulary


@dataclass(frozen=True)
class ModelSpec:
    """Everything that decides the shape and the start of a model, besides the statistics and the seed."""

    encoder: str
    backbone: str
    embedding_dim: int
    tower: Tower
    category_std: float
    encoder_options: dict[str, Any] = field(default_factory=dict)
    backbone_options: dict[str, Any] = field(default_factory=dict)

    def resolved(self) -> ModelSpec:
        """The same with every option checked against its signature and every default filled in."""
        encoder = encoders.encoders.get(self.encoder)
        backbone = backbones.backbones.get(self.backbone)
        return ModelSpec(
            **{
                **vars(self),
                "encoder_options": bind_options("encoder", self.encoder, encoder, self.encoder_options),
                "backbone_options": bind_options("backbone", self.backbone, backbone, self.backbone_options),
            }
        )

    def to_tables(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_tables(cls, tables: dict[str, Any]) -> ModelSpec:
        tower = tables["tower"]
        return cls(**{**tables, "tower": Tower(**{**tower, "hidden": tuple(tower["hidden"])})})


class CategoryTable(nn.Module):
    """One flat lookup table for all categorical fields: row `offset_j + id_j` is the vector of field j.

    *Shape*: ids `[B, C]` int64 -> `[B, C, width]`.
    """

    offsets: Tensor

    def __init__(self, vocabulary_sizes: Sequence[int], width: int, std: float) -> None:
        super().__init__()
        offsets = [0, *accumulate(vocabulary_sizes)]
        self.register_buffer("offsets", torch.tensor(offsets[:-1], dtype=torch.int64), persistent=False)
        self.weight = nn.Parameter(torch.randn(offsets[-1], width) * std)
        with torch.no_grad():
            # What training may never show (missing, unseen) starts at the neutral vector, not at a random one.
            for reserved in range(Vocabulary.FIRST_ID):
                self.weight[self.offsets + reserved] = 0.0

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids + self.offsets, self.weight)


class CtrModel(nn.Module):
    """Category lookup, numerical encoder and backbone; the encoder is the only thing that varies between methods.

    *Shape*: values `[B, N]` float64 (NaN = missing), category_ids `[B, C]` int64 -> logits `[B]`.

    >>> import numpy as np
    >>> from scalarlens import backbones, encoders
    >>> from scalarlens.table.statistics import TrainingStatistics
    >>> encoder = encoders.build("deer", TrainingStatistics.from_arrays(np.array([[0.0], [9.0]])), 2, 4)
    >>> model = CtrModel(encoder, backbones.build("dnn", 1, 2, 4), vocabulary_sizes=[5, 7])
    >>> model(torch.zeros(3, 1).double(), torch.zeros(3, 2, dtype=torch.int64)).shape
    torch.Size([3])
    """

    def __init__(
        self,
        encoder: NumericalEncoder,
        backbone: Backbone,
        vocabulary_sizes: Sequence[int],
        category_std: float = TABLE_STD,
    ) -> None:
        super().__init__()
        self.categories = CategoryTable(vocabulary_sizes, encoder.embedding_dim, category_std)
        self.encoder = encoder
        self.backbone = backbone
        self.category_weights = CategoryTable(vocabulary_sizes, 1, TABLE_STD) if backbone.first_order else None

    @classmethod
    def build(cls, spec: ModelSpec, statistics: TrainingStatistics) -> CtrModel:
        """The model that a specification names; `statistics` in the scale that the encoder will see."""
        n_categories = len(statistics.vocabularies)
        encoder = encoders.build(spec.encoder, statistics, n_categories, spec.embedding_dim, **spec.encoder_options)
        backbone = backbones.build(
            spec.backbone, encoder.n_values, n_categories, spec.embedding_dim, spec.tower, **spec.backbone_options
        )
        return cls(encoder, backbone, statistics.vocabulary_sizes, spec.category_std)

    def forward(self, values: Tensor, category_ids: Tensor) -> Tensor:
        category_tokens = self.categories(category_ids)
        value_tokens = self.encoder(values, category_tokens)
        if self.category_weights is None:
            logits: Tensor = self.backbone(value_tokens, category_tokens)
        else:
            weights = self.category_weights(category_ids).squeeze(-1)
            logits = self.backbone(value_tokens, category_tokens, weights)
        return logits

    @torch.no_grad()
    def score(self, batches: Iterable[Batch]) -> np.ndarray:
        """Logits of every row in evaluation mode, `[rows]`; the one way in which anything here is scored."""
        was_training = self.training
        self.eval()
        logits = [self(batch.values, batch.category_ids) for batch in batches]
        self.train(was_training)
        return torch.cat(logits).float().cpu().numpy() if logits else np.empty(0, dtype=np.float32)
