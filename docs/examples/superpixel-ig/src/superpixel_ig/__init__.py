"""Integrated gradients summed over superpixels, as a kind of explainer for mlflow-auditor."""

from superpixel_ig.explainer import SuperpixelConfig, SuperpixelExplainer
from superpixel_ig.regions import superpixels

__all__ = ["SuperpixelConfig", "SuperpixelExplainer", "superpixels"]
