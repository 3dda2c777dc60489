"""Memory that is kept: a buffer of the same size costs no page faults the second time."""

import subprocess
import sys

import pytest

COUNT = """
import resource
import numpy as np
from auditor.subject.memory import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(6):
        np.ones(6_000_000)  # 48 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
kept = keep_memory()
faults()
print(first, faults(), kept)
"""


def counted(**environment) -> tuple[int, int, bool]:
    import os

    done = subprocess.run(
        [sys.executable, "-c", COUNT], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    first, second, third = done.stdout.split()
    return int(first), int(second), third == "True"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_a_buffer_faults_once():
    first, second, third = counted()
    assert third
    assert first > 1_000  # most pages, every time; some may be huge
    assert second < first / 20


def test_it_can_be_left_alone():
    first, second, third = counted(AUDITOR_KEEP_MEMORY="0")
    assert not third
    assert second > first / 2
