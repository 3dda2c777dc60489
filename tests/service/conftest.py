"""A registered model with explainers, and the service's ASGI application around it, once per session."""

from __future__ import annotations

import io
import logging
import os
import time
import warnings

import pytest
import torch
from PIL import Image

from auditor.attribution.heatmap import to_rgb


@pytest.fixture(scope="session")
def served(store, trained, concepts, heads):
    """models:/served/1 (alias champion) with concepts and heads attached; gives its URI."""
    import mlflow

    from auditor.plugins import attach, load_subject, log_subject

    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    uri = log_subject(trained[0], "served", experiment="tests")
    subject = load_subject(uri)
    attach(concepts, uri, "concepts", subject=subject)
    attach(heads, uri, "heads", subject=subject, attach_anyway=True)
    mlflow.MlflowClient().set_registered_model_alias("served", "champion", uri.rpartition("/")[2])
    concepts.name = heads.name = ""
    return uri


@pytest.fixture(scope="session")
def http(served):
    """A test client on BentoML's application; the lifespan runs, the model is loaded and warm."""
    bentoml = pytest.importorskip("bentoml")
    assert bentoml
    from starlette.testclient import TestClient

    values = {
        "AUDITOR_MODEL": served,
        "AUDITOR_POLL_S": "3600",
        "AUDITOR_LOG_REQUESTS": "false",
        "AUDITOR_SAMPLE_IMAGES": "sklearn:digits",
        "AUDITOR_MAX_BODY_MB": "1",
        "AUDITOR_MAX_PIXELS": "1000000",
    }
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    from auditor.service.service import AuditorService

    logger, threads, filters = logging.getLogger("auditor"), torch.get_num_threads(), warnings.filters[:]
    habits = (logger.handlers[:], logger.level, logger.propagate)
    with TestClient(AuditorService.to_asgi(), base_url="http://localhost", raise_server_exceptions=False) as client:
        # a worker settles in as if the process were its own; here other tests live in it
        logger.handlers[:], logger.propagate = habits[0], habits[2]
        logger.setLevel(habits[1])
        torch.set_num_threads(threads)
        warnings.filters[:] = filters
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
        deadline = time.monotonic() + 300
        while client.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline, client.get("/model").text
            time.sleep(0.1)
        yield client


def png_of(image) -> bytes:
    with io.BytesIO() as stream:
        Image.fromarray(to_rgb(image)).save(stream, "PNG")
        return stream.getvalue()


@pytest.fixture
def pngs(images) -> list[bytes]:
    return [png_of(image) for image in images]
