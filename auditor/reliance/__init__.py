"""What a class hangs on, measured by intervention: hide it, keep only it, transplant it, compare how alike it is.

`measure` takes a model and labelled images, `judge` says in words what was found, `metrics_of` gives the numbers.

May use: errors, progress, subject, network, data, runners, perturbation, attribution, metrics, stability,
explainers.
"""

from __future__ import annotations

from auditor.reliance.annotations import read_regions, shares_of_heat
from auditor.reliance.class_metrics import metrics_of
from auditor.reliance.heat import Heat, explainer_heat, plain_heat
from auditor.reliance.judgement import Finding, judge
from auditor.reliance.measures import ClassReliance, Reliance, RelianceConfig, measure
from auditor.reliance.regions import Boxes

__all__ = [
    "Boxes",
    "ClassReliance",
    "Finding",
    "Heat",
    "Reliance",
    "RelianceConfig",
    "explainer_heat",
    "judge",
    "measure",
    "metrics_of",
    "plain_heat",
    "read_regions",
    "shares_of_heat",
]
