"""Training: the frozen protocol, the loop, and checkpoints that resume to the same bits."""

from scalarlens.training.loop import FitResult, fit
from scalarlens.training.recipe import RECIPES, Recipe

__all__ = ["RECIPES", "FitResult", "Recipe", "fit"]
