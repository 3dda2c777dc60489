"""What fits measured of themselves, as measures of the audit: ``explainer/<name>/fit/<metric>``.

The values are those of the artifact, whose digest the audit names; nothing is measured again. So they cost nothing and
are there for explainers too that the audit was not asked to explain with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from auditor.explainers.base import Explainer
from auditor.metrics.fit_names import direction_of
from auditor.metrics.measure import Measure, of_value

ALSO = {"fidelity": "fidelity_floor"}  # also without ``fit/``, with what a constant reaches as the null
N_HELD_OUT = "n_held_out"  # of how many images the other metrics of a fit are


def fit_measures(explainers: Mapping[str, Explainer]) -> dict[str, Measure]:
    """Return what the fits of some explainers measured, by full name; what came out NaN has failed.

    >>> from types import SimpleNamespace
    >>> fitted = SimpleNamespace(metrics={"f_cls": 0.9, "n_held_out": 40.0})
    >>> measure = fit_measures({"concepts": fitted})["explainer/concepts/fit/f_cls"]
    >>> measure.value, measure.n, measure.direction
    (0.9, 40, 'up')
    """
    measures = {}
    for name, explainer in sorted(explainers.items()):
        held_out = explainer.metrics.get(N_HELD_OUT, 0.0)
        n = int(held_out) if math.isfinite(held_out) and held_out >= 1 else 1
        for metric, value in sorted(explainer.metrics.items()):
            measure = of_value(float(value), direction_of(metric), n=n)
            if measure.status == "failed":
                measure = replace(measure, reason=f"the fit measured {float(value)}")
            measures[f"explainer/{name}/fit/{metric}"] = measure
        for metric, null in ALSO.items():  # the names under which the papers' own quantities are known
            if f"explainer/{name}/fit/{metric}" in measures:
                floor = explainer.metrics.get(null)
                measures[f"explainer/{name}/{metric}"] = replace(measures[f"explainer/{name}/fit/{metric}"], null=floor)
    return measures
