"""A tree fitted once to the demo's digits, for this folder."""

from __future__ import annotations

import pytest

import auditor
from auditor import open_data

OPTIONS = {"n_features": 48, "epochs": 8, "refit_every": 4, "seed": 0}


@pytest.fixture(scope="package")
def fitted(trained):
    subject, _ = trained
    data = open_data("sklearn:digits")
    explainer = auditor.fit("tree", subject, data, **OPTIONS)
    images = next(data.batches(subject, 24)).images
    return subject, explainer, images, explainer.explain(subject, images)
