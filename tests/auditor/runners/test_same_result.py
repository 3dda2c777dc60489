"""A fit gives the same artifact by this process, one worker, two workers and two nodes, for every kind.

.venv/bin/python -m pytest tests/auditor/runners/test_same_result.py -m slow
"""

import os

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from auditor import fit, open_data
from auditor.runners.ray_pool import PoolOptions, ray_workers
from auditor.runners.runner import using
from tests.stores import settle

pytestmark = pytest.mark.slow

OPTIONS = {
    "nmf": {"rank": 5},
    "coupled": {"rank": 5, "max_iter": 40},
    "xnn": {"max_epochs": 6, "targets": "all"},
    "tree": {"epochs": 3, "n_features": 16},
    "rde": {"max_steps": 4, "draws": 4, "eval_draws": 8, "calibration_images": 4, "timeout_s": None},
    "deepfacto": {"rank": 4, "epochs": 2},
}
N = 700


@pytest.fixture(scope="module")
def cluster():
    """Two nodes on this machine with one processor each."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 2**28})
    cluster.add_node(num_cpus=1, object_store_memory=2**28)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Digits as files, by their class; one is broken."""
    folder = tmp_path_factory.mktemp("same") / "photos"
    digits = load_digits()
    for k in range(N):
        path = folder / str(digits.target[k]) / f"{k:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[k] * 15.9).astype(np.uint8)).save(path)
        settle(path)
    (folder / "0" / "0000.png").write_bytes(b"broken")
    return folder


def fits(kind, subject, photos, cluster):
    """The fit here, and by one worker and two (on two nodes); with what the workers read."""
    yield fit(kind, subject, open_data(photos), seed=3, **OPTIONS[kind]), None
    for workers in (1, 2):
        with ray_workers(PoolOptions(cluster.address, workers)) as pool, using(pool):
            data = open_data(photos)
            yield fit(kind, subject, data, seed=3, **OPTIONS[kind]), pool.tally
            assert list(data.skipped) == ["0/0000.png"]


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_artifact_is_the_same_wherever_it_is_fitted(kind, digits, photos, cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("AUDITOR_CACHE", str(tmp_path / "cache"))
    (local, _), *others = fits(kind, digits, photos, cluster)
    for other, tally in others:
        assert (other.data_digest_, other.subject_digest_) == (local.data_digest_, local.subject_digest_)
        assert other.fitted_images.to_json() == local.fitted_images.to_json()
        tensors = other.tensors()
        for name, tensor in local.tensors().items():
            if tensor.dtype.is_floating_point:
                torch.testing.assert_close(
                    tensors[name], tensor, rtol=1e-6, atol=1e-6, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
                )
            else:
                assert torch.equal(tensors[name], tensor), name
        for name, value in local.metrics.items():
            np.testing.assert_allclose(other.metrics[name], value, rtol=0, atol=1e-9, err_msg=name)
        assert sum(share.images for share in tally.workers.values()) >= N - 1
