"""Workers of a Ray cluster: the local result, whatever is killed meanwhile, and one sentence where nothing can run.

.venv/bin/python -m pytest tests/auditor/runners/test_ray_pool.py -m slow
"""

import logging
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from auditor import fit, open_data
from auditor.errors import ClusterError, OptionError, TamperError
from auditor.runners.cluster import on_cluster
from auditor.runners.ray_pool import PoolOptions, ray_workers, travelling
from auditor.runners.runner import using
from auditor.runners.worker import Welcome
from auditor.subject import travel
from tests.stores import write_folder

slow = pytest.mark.slow


@dataclass(frozen=True)
class Squares:
    """Yields what an item gives in two parts, and says so in the log."""

    def __call__(self, item):
        logging.getLogger("auditor.tests").warning("item %d", item)
        yield item, os.getpid()
        yield item * item, os.getpid()


@dataclass(frozen=True)
class Killing:
    """Ends its own process at an item, the first ``times`` times."""

    folder: str
    item: int
    times: int

    def __call__(self, item):
        yield item
        if item == self.item:
            for k in range(self.times):
                try:
                    (Path(self.folder) / f"killed-{k}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        yield -item


@dataclass(frozen=True)
class Failing:
    """Raises at an item."""

    error: Exception

    def __call__(self, item):
        yield item
        if item == 2:
            raise self.error


@dataclass(frozen=True)
class Environment:
    """Yields a variable of its process."""

    def __call__(self, item):
        yield os.environ.get(item)


@pytest.fixture(scope="module")
def cluster():
    """Two nodes on this machine with one processor each."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 2**28})
    cluster.add_node(num_cpus=1, object_store_memory=2**28)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def pool(cluster):
    with ray_workers(PoolOptions(cluster.address)) as pool:
        yield pool


@slow
def test_parts_come_in_order_from_all_workers_and_logs_with_their_names(pool, caplog):
    with caplog.at_level(logging.WARNING, "auditor"):
        parts = list(pool.stream(Squares(), range(20)))
    assert [value for value, _ in parts] == [v for k in range(20) for v in (k, k * k)]
    assert len({process for _, process in parts}) == 2
    assert "worker 1: item 0" in caplog.text
    assert pool.n_workers == 2
    assert pool.is_remote
    assert list(pool.map(abs, [-1, -2])) == [1, 2]


@slow
def test_a_killed_worker_is_replaced_and_its_work_done_again(pool, tmp_path, caplog):
    work = Killing(str(tmp_path), 3, 2)
    assert list(pool.stream(work, range(8))) == [v for k in range(8) for v in (k, -k)]
    assert len(pool.tally.lost) == 2
    assert pool.n_workers == 2
    assert "ended before its time" in caplog.text


@slow
def test_an_item_that_ends_every_worker_is_an_error_that_names_it(pool, tmp_path):
    with pytest.raises(ClusterError, match=r"part 4 of the work ended 3 workers, the last of them: .*; look for an im"):
        list(pool.stream(Killing(str(tmp_path), 3, 99), range(8)))


@slow
def test_errors_of_a_worker_are_those_of_its_function(pool):
    with pytest.raises(TamperError, match="this one"):
        list(pool.stream(Failing(TamperError("this one")), range(5)))
    with pytest.raises(ZeroDivisionError, match="by nought"):
        list(pool.stream(Failing(ZeroDivisionError("by nought")), range(5)))
    assert list(pool.map(abs, [-1])) == [1]  # and it goes on


@slow
def test_credentials_reach_workers_and_no_log(cluster, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-ray-tests")
    monkeypatch.setenv("AUDITOR_SIGN_KEY", "/keys/mine.pem")
    with ray_workers(PoolOptions(cluster.address)) as pool:
        assert list(pool.stream(Environment(), ["AWS_SECRET_ACCESS_KEY"])) == ["secret-of-ray-tests"]
        assert list(pool.stream(Environment(), ["MLFLOW_TRACKING_URI"])) == [os.environ.get("MLFLOW_TRACKING_URI")]
        import ray

        folder = Path(ray._private.worker._global_node.get_session_dir_path())
    texts = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 10**8]
    assert texts
    assert not [path for path in texts if b"secret-of-ray-tests" in path.read_bytes()]


def test_what_travels_are_addresses_and_credentials_but_no_key_to_sign_with():
    names = {"AWS_A": "1", "MLFLOW_X": "2", "AUDITOR_CACHE": "3", "AUDITOR_SIGN_KEY": "4", "HOME": "5", "PATH": "6"}
    assert set(travelling(names)) == {"AWS_A", "MLFLOW_X", "AUDITOR_CACHE"}


def interrupted(cluster):
    with suppress(KeyboardInterrupt), ray_workers(PoolOptions(cluster.address)) as pool:
        next(iter(pool.stream(Squares(), range(5))))
        raise KeyboardInterrupt


@slow
def test_no_actor_is_left_when_a_block_ends_by_interruption(cluster):
    interrupted(cluster)
    assert alive(cluster) == []


def alive(cluster):
    """The actors of the cluster that live."""
    import ray
    from ray._private.state import actors

    ray.init(address=cluster.address, log_to_driver=False)
    try:
        for _ in range(50):
            living = [actor for actor in actors().values() if actor["State"] != "DEAD"]
            if not living:
                return []
            time.sleep(0.2)
        return living
    finally:
        ray.shutdown()


@slow
def test_a_worker_of_another_version_is_refused(cluster, monkeypatch):
    here = Welcome.here()
    other = Welcome("9.9.9", here.source, here.python, here.torch, here.host, 1)
    monkeypatch.setattr(Welcome, "here", classmethod(lambda cls: other))
    sentence = r"runs mlflow-auditor .* and this command 9\.9\.9; install the same version on every node"
    with pytest.raises(ClusterError, match=sentence), ray_workers(PoolOptions(cluster.address)):
        pass


@slow
def test_a_model_of_another_digest_is_refused_by_workers(pool, digits, digits_data, trained):
    from auditor.subject.subject import Subject

    other = Subject(trained[0].module, input_shape=(1, 8, 8), class_names=[*"abcdefghij"])
    other.origin = travel.Built(trained[0].module, {"input_shape": (1, 8, 8)})
    with using(pool), pytest.raises(TamperError, match="and the command that asks has"):
        fit("nmf", other, digits_data, rank=4, layer=digits.default_layer())


@slow
def test_the_fit_is_the_same_by_one_two_and_no_workers(cluster, digits, tmp_path, monkeypatch):
    monkeypatch.setenv("AUDITOR_CACHE", str(tmp_path / "cache"))
    write_folder(tmp_path / "photos", 600)
    (tmp_path / "photos" / "dog" / "001.png").write_bytes(b"broken")
    fits = []
    for workers in (0, 1, 2):
        data = open_data(tmp_path / "photos")
        if not workers:
            fits.append(fit("nmf", digits, data, rank=5))
            continue
        with ray_workers(PoolOptions(cluster.address, workers)) as pool, using(pool):
            fits.append(fit("nmf", digits, data, rank=5))
        assert sum(share.images for share in pool.tally.workers.values()) == 2 * 599
        assert list(data.skipped) == ["dog/001.png"]
    local, *others = fits
    for other in others:
        assert (other.data_digest_, other.subject_digest_) == (local.data_digest_, local.subject_digest_)
        torch.testing.assert_close(other.W_, local.W_, rtol=0, atol=1e-6)  # float32 sums of other numbers of threads
        for name, value in local.metrics.items():
            np.testing.assert_allclose(other.metrics[name], value, rtol=0, atol=1e-9, err_msg=name)
        assert other.fitted_images.to_json() == local.fitted_images.to_json()


@slow
def test_a_node_that_goes_takes_nothing_with_it(cluster):
    """Last of this file's users of two nodes: one of them is removed under way."""
    node = cluster.add_node(num_cpus=1, object_store_memory=2**28)
    with ray_workers(PoolOptions(cluster.address, 3)) as pool:
        timer = threading.Timer(1.0, lambda: cluster.remove_node(node, allow_graceful=False))
        timer.start()
        results = list(pool.map(Slowly(), range(60)))
        timer.join()
        assert results == [k + 1 for k in range(60)]
        assert pool.tally.lost


@dataclass(frozen=True)
class Slowly:
    """Takes a tenth of a second."""

    def __call__(self, item):
        time.sleep(0.1)
        return item + 1


def test_an_address_where_nothing_answers_is_one_sentence():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    sentence = rf"cluster ray://127.0.0.1:{port}: nothing answers there within 10 s"
    with pytest.raises(ClusterError, match=sentence), on_cluster(f"ray://127.0.0.1:{port}"):
        pass
    assert time.monotonic() - began < 30
    with pytest.raises(ClusterError, match="want auto, local or ray://HOST:PORT"), on_cluster("http://head:10001"):
        pass


def test_a_number_of_workers_is_a_number(monkeypatch):
    monkeypatch.setenv("AUDITOR_CLUSTER_WORKERS", "many")
    sentence = "AUDITOR_CLUSTER_WORKERS must be a whole number, got 'many'"
    with pytest.raises(OptionError, match=sentence), on_cluster("local"):
        pass


def test_without_the_package_the_option_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    sentence = r"ray is not installed; pip install 'mlflow-auditor\[cluster\]'"
    with pytest.raises(ClusterError, match=sentence), on_cluster("local"):
        pass
