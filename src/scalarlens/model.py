"""CtrModel: look up categories, encode numbers, hand both to the backbone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalarlens.backbones.base import Backbone
from scalarlens.encoders.base import TABLE_STD, NumericalEncoder
from scalarlens.table.statistics import Vocabulary


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

    def forward(self, values: Tensor, category_ids: Tensor) -> Tensor:
        category_tokens = self.categories(category_ids)
        value_tokens = self.encoder(values, category_tokens)
        if self.category_weights is None:
            logits: Tensor = self.backbone(value_tokens, category_tokens)
        else:
            weights = self.category_weights(category_ids).squeeze(-1)
            logits = self.backbone(value_tokens, category_tokens, weights)
        return logits
