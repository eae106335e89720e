"""Field tokens to one logit per row."""

from scalarlens.backbones.base import Backbone, Tower, backbones, build

__all__ = ["Backbone", "Tower", "backbones", "build"]
