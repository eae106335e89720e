"""Backbones broken on purpose, in one place each, filed under the check that must reject them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalarlens.backbones.base import Tower
from scalarlens.backbones.dnn import Dnn
from scalarlens.backbones.linear import LinearConsumer

from . import backbone_checks as contract
from .mutation import Mutants

MUTANTS = Mutants()


class Wide(LinearConsumer):
    """Not a mutant but a base for some: `y = b + <a, z> + sum_j w_j` with a weight per category.

    *Shape*: value_tokens `[B, N, d]`, category_tokens `[B, C, d]`, category_weights `[B, C]` -> logits `[B]`.

    >>> Wide(1, 1, 4, Tower())(torch.ones(3, 1, 4), torch.ones(3, 1, 4), torch.ones(3, 1)).shape
    torch.Size([3])
    """

    first_order = True

    def forward(self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor | None = None) -> Tensor:
        assert category_weights is not None
        return super().forward(value_tokens, category_tokens) + category_weights.sum(1)


@MUTANTS.breaks(contract.check_shape_and_dtype)
class KeepsUnitDimension(LinearConsumer):
    """Logits `[B, 1]`."""

    def score(self, tokens: Tensor) -> Tensor:
        return super().score(tokens).unsqueeze(-1)


@MUTANTS.breaks(contract.check_shape_and_dtype)
class DoubleLogits(LinearConsumer):
    """Logits in float64 whatever the tokens are."""

    def score(self, tokens: Tensor) -> Tensor:
        return super().score(tokens).double()


@MUTANTS.breaks(contract.check_finite)
class Overflow(LinearConsumer):
    """An exponential that leaves float32."""

    def score(self, tokens: Tensor) -> Tensor:
        return super().score(tokens) + super().score(tokens).sub(50).exp()


@MUTANTS.breaks(contract.check_finite)
class RootOfZero(LinearConsumer):
    """A finite logit whose gradient is not, at tokens of size 0."""

    def score(self, tokens: Tensor) -> Tensor:
        length = (tokens * self.head.weight.view(tokens.shape[1:])).square().sum((1, 2)).sqrt()
        return super().score(tokens) + length


@MUTANTS.breaks(contract.check_logit_is_not_a_probability)
class Probability(LinearConsumer):
    """A sigmoid where the loss expects none."""

    def score(self, tokens: Tensor) -> Tensor:
        return super().score(tokens).sigmoid()


@MUTANTS.breaks(contract.check_tables_without_categories_or_without_numbers)
class MeanOfCategories(LinearConsumer):
    """The mean over no category is NaN."""

    def forward(self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor | None = None) -> Tensor:
        return super().forward(value_tokens, category_tokens) + category_tokens.mean((1, 2))


@MUTANTS.breaks(contract.check_tables_without_categories_or_without_numbers)
class NeedsNumbers(LinearConsumer):
    """Divides by the number of numerical fields."""

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.share = n_categories / n_values


@MUTANTS.breaks(contract.check_rows_are_independent)
class BatchMean(LinearConsumer):
    """Centred by the batch; any permutation of rows leaves this unseen."""

    def score(self, tokens: Tensor) -> Tensor:
        logits = super().score(tokens)
        return logits - 0.5 * logits.mean()


@MUTANTS.breaks(contract.check_batch_of_none_and_one)
class LargestOfBatch(LinearConsumer):
    """The largest of no rows does not exist."""

    def score(self, tokens: Tensor) -> Tensor:
        return super().score(tokens + 0 * tokens.amax(0))


@MUTANTS.breaks(contract.check_batch_of_none_and_one)
class ShortCutForOneRow(LinearConsumer):
    """A short cut that loses the batch dimension of a single row."""

    def score(self, tokens: Tensor) -> Tensor:
        logits = super().score(tokens)
        return logits[0] if tokens.shape[0] == 1 else logits


@MUTANTS.breaks(contract.check_memory_layout_does_not_matter)
class FlatView(LinearConsumer):
    """Takes for granted that rows lie one after the other in memory."""

    def forward(self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor | None = None) -> Tensor:
        return super().forward(value_tokens.view(-1).view(value_tokens.shape), category_tokens)


@MUTANTS.breaks(contract.check_every_parameter_learns)
class UnusedParameter(LinearConsumer):
    """A parameter that nothing reads."""

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.temperature = nn.Parameter(torch.ones(()))


@MUTANTS.breaks(contract.check_every_parameter_learns)
class DetachedBias(LinearConsumer):
    """A bias that stays where it started."""

    def score(self, tokens: Tensor) -> Tensor:
        return F.linear(tokens.flatten(1), self.head.weight, self.head.bias.detach()).squeeze(-1)


@MUTANTS.breaks(contract.check_inputs_are_untouched)
class ScalesTokensInPlace(LinearConsumer):
    """Writes into the tokens that it was handed."""

    def forward(self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor | None = None) -> Tensor:
        return super().forward(value_tokens.mul_(0.5), category_tokens)


@MUTANTS.breaks(contract.check_inputs_are_untouched)
class ClearsWeightsInPlace(Wide):
    """Writes into the category weights after it has read them."""

    def forward(self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor | None = None) -> Tensor:
        logits = super().forward(value_tokens, category_tokens, category_weights)
        assert category_weights is not None
        category_weights.zero_()
        return logits


@MUTANTS.breaks(contract.check_reads_tokens_only)
class TakesValues(LinearConsumer):
    """Has a way in for raw numbers."""

    def forward(
        self,
        value_tokens: Tensor,
        category_tokens: Tensor,
        category_weights: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        return super().forward(value_tokens, category_tokens)


@MUTANTS.breaks(contract.check_every_field_moves_the_logit)
class SkipsLastCategory(LinearConsumer):
    """One categorical field counts for nothing; part of its weights still learns from the others."""

    def forward(self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor | None = None) -> Tensor:
        if self.n_categories:
            category_tokens = torch.cat([category_tokens[:, :-1], category_tokens[:, :1]], dim=1)
        return super().forward(value_tokens, category_tokens)


@MUTANTS.breaks(contract.check_every_field_moves_the_logit)
class DetachesNumbers(LinearConsumer):
    """No gradient flows back into the numerical tokens."""

    def forward(self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor | None = None) -> Tensor:
        return super().forward(value_tokens.detach(), category_tokens)


@MUTANTS.breaks(contract.check_first_order_is_as_declared)
class IgnoresWeights(Wide):
    """Declares a linear branch and does not use the weights of categories."""

    def forward(self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor | None = None) -> Tensor:
        return super().forward(value_tokens, category_tokens, torch.zeros_like(value_tokens[:, :0, 0]))


@MUTANTS.breaks(contract.check_first_order_is_as_declared)
class UndeclaredWeights(Wide):
    """Uses the weights of categories where it gets them, and declares no linear branch."""

    first_order = False

    def forward(self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor | None = None) -> Tensor:
        if category_weights is None:
            category_weights = torch.zeros_like(category_tokens[..., 0])
        return super().forward(value_tokens, category_tokens, category_weights)


@MUTANTS.breaks(contract.check_state_dict_is_the_whole_backbone)
class NonPersistentScale(LinearConsumer):
    """A random scale that is not saved."""

    scale: Tensor

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.register_buffer("scale", 1 + torch.rand(()), persistent=False)

    def score(self, tokens: Tensor) -> Tensor:
        return super().score(tokens * self.scale)


@MUTANTS.breaks(contract.check_state_dict_is_the_whole_backbone)
class SharedMemory(LinearConsumer):
    """Two names for one tensor, which safetensors refuses."""

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.again = self.head


@MUTANTS.breaks(contract.check_exports_with_a_free_batch_size)
class BranchesOnData(LinearConsumer):
    """Looks at the tokens to decide what to compute."""

    def score(self, tokens: Tensor) -> Tensor:
        return super().score(tokens) if (tokens > 3).any() else super().score(tokens.clone())


@MUTANTS.breaks(contract.check_exports_with_a_free_batch_size)
class BranchesOnRows(LinearConsumer):
    """Fixes on one side whether a batch is large."""

    def score(self, tokens: Tensor) -> Tensor:
        return super().score(tokens) if tokens.shape[0] > 4 else super().score(tokens.clone())


@MUTANTS.breaks(contract.check_same_seed_same_bits)
class DrawsFromNumpy(LinearConsumer):
    """Its start comes from another global generator."""

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.head.weight.data += np.random.rand()


@MUTANTS.breaks(contract.check_same_seed_same_bits)
class SeedsItself(LinearConsumer):
    """Every seed gives the same start."""

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        torch.manual_seed(0)
        super().__init__(n_values, n_categories, embedding_dim, tower)


@MUTANTS.breaks(contract.check_forward_draws_nothing_and_changes_nothing)
class DrawsInForward(LinearConsumer):
    """Moves the global generator, so that what comes after depends on how often it ran."""

    def score(self, tokens: Tensor) -> Tensor:
        torch.rand(())
        return super().score(tokens)


@MUTANTS.breaks(contract.check_forward_draws_nothing_and_changes_nothing)
class CountsCalls(LinearConsumer):
    """Scoring changes what would be saved."""

    calls: Tensor

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def score(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return super().score(tokens)


@MUTANTS.breaks(contract.check_dropout_acts_in_training_only)
class AlwaysDrops(Dnn):
    """Dropout that does not know of evaluation."""

    def score(self, tokens: Tensor) -> Tensor:
        return super().score(F.dropout(tokens, self.tower.dropout) if self.tower.dropout else tokens)


@MUTANTS.breaks(contract.check_dropout_acts_in_training_only)
class NeverDrops(Dnn):
    """Takes the widths of the tower and forgets its dropout."""

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        tower = Tower(hidden=tower.hidden, batch_norm=tower.batch_norm)
        super().__init__(n_values, n_categories, embedding_dim, tower)


@MUTANTS.breaks(contract.check_batch_norm_learns_in_training_only)
class AlwaysNormalizesByBatch(Dnn):
    """Batch norm that does not know of evaluation."""

    def score(self, tokens: Tensor) -> Tensor:
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.train()
        return super().score(tokens)


@MUTANTS.breaks(contract.check_batch_norm_learns_in_training_only)
class NeverNormalizes(Dnn):
    """Takes the widths of the tower and forgets its batch norm."""

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        tower = Tower(hidden=tower.hidden, dropout=tower.dropout)
        super().__init__(n_values, n_categories, embedding_dim, tower)


@MUTANTS.breaks(contract.check_options_are_keyword_only_with_defaults)
class SwallowsTypos(LinearConsumer):
    """Any option is accepted and none is read."""

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower, **options: object) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)


@MUTANTS.breaks(contract.check_options_are_keyword_only_with_defaults)
class PositionalOption(LinearConsumer):
    """An option that the registry does not see."""

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower, layers: int = 3) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)


@MUTANTS.breaks(contract.check_documented_with_shape_example_and_citation)
class NoExample(LinearConsumer):
    """A docstring without an example."""

    documentation = "One weight per component.\n\n*Shape*: tokens `[B, F, d]` -> logits `[B]`."


@MUTANTS.breaks(contract.check_documented_with_shape_example_and_citation)
class NoCitation(LinearConsumer):
    """Says nothing of where it comes from."""

    citation = ""
