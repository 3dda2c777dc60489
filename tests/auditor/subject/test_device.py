"""The device that models are loaded to: the one named, while it is named."""

import pytest
import torch

from auditor.errors import OptionError
from auditor.subject.device import checked_device, chosen_device, running_on


def test_it_is_the_cpu_unless_another_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen_device() == torch.device("cpu")
    with running_on("cuda:1"):
        assert chosen_device() == torch.device("cuda:1")
        with running_on("cpu"):
            assert chosen_device() == torch.device("cpu")
        assert chosen_device() == torch.device("cuda:1")
    assert chosen_device() == torch.device("cpu")
    assert checked_device("auto") == "cuda"
    with pytest.raises(OptionError, match="there are 2 GPUs here, numbered from 0"):
        checked_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:x", ""])
def test_what_is_no_device_of_ours_is_refused(name):
    with pytest.raises(OptionError, match=r"want cpu, cuda, cuda:1 or auto\."):
        checked_device(name)


def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert checked_device("auto") == "cpu"
    with pytest.raises(OptionError, match="torch finds no GPU here; take --device cpu"), running_on("cuda"):
        raise AssertionError
    assert chosen_device() == torch.device("cpu")
