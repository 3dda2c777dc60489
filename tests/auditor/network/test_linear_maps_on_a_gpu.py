"""Linear maps on fake CUDA tensors: every tensor they make is on the device of what they are given."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from auditor.attribution.excitation_rules import safe_reciprocal
from auditor.network.linear_maps import Attention, AttentionFromRight, Clipped, Convolution, Dense, Mean, rows_times

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer")


def maps(device):
    w = torch.rand(6, 4, device=device)
    kernel = torch.rand(5, 4, 3, 3, device=device)
    shape = (2, 4, 7, 8)
    options = {"dilation": [1, 1], "groups": 1}
    return {
        "dense": (Dense(None, Clipped(w, {}, "a")), (2, 3, 4)),
        "convolution": (Convolution(None, Clipped(kernel, {}, "b"), shape, [1, 1], [(1, 1)] * 2, **options), shape),
        "strided": (Convolution(None, Clipped(kernel, {}, "c"), shape, [2, 2], [(0, 1)] * 2, **options), shape),
        "attention": (Attention(None, torch.rand(2, 5, 3, device=device), (2, 3, 4)), (2, 3, 4)),
        "attention from the right": (AttentionFromRight(None, torch.rand(2, 4, 5, device=device)), (2, 3, 4)),
        "mean": (Mean(None, [1], False, (2, 3, 4)), (2, 3, 4)),
    }


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", list(maps("meta")))
def test_spread_and_gather_stay_on_the_device(name, sign):
    with FakeTensorMode():
        linear, shape = maps("cuda")[name]
        a = torch.rand(shape, device="cuda")
        out = linear.spread(a, sign)
        q = torch.rand(3, *out.shape, device="cuda") * safe_reciprocal(out)
        back = linear.gather(q, sign)
        assert (out.device.type, back.device.type) == ("cuda", "cuda")
        assert tuple(back.shape) == (3, *shape)


def test_a_mix_of_devices_is_refused():
    with FakeTensorMode():
        linear, shape = maps("cuda")["dense"]
        with pytest.raises(RuntimeError, match="device"):
            linear.spread(torch.rand(shape))


def test_rows_times_takes_the_plain_product_on_a_gpu():
    with FakeTensorMode():
        out = rows_times(torch.rand(5, 4, device="cuda"), torch.rand(3, 4, device="cuda"))
        assert (tuple(out.shape), out.device.type) == ((5, 3), "cuda")
