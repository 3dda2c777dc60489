"""Sense of heatmaps on a transformer: trained on drawn objects, whose position is known, its heat lies on them."""

import pytest
import torch
import torch.nn.functional as F
from torchvision.models import VisionTransformer

from auditor.attribution.excitation import ExcitationBackprop

SIDE = 32


def shape_of(kind, dy, dx, r):
    if kind == 0:
        return dy**2 + dx**2 <= r * r
    inside = (dy.abs() <= r) & (dx.abs() <= r)
    if kind == 1:
        return inside & ~((dy.abs() <= r - 2) & (dx.abs() <= r - 2))
    return inside & ((dy.abs() <= 1) | (dx.abs() <= 1)) if kind == 2 else inside & ((dy - dx).abs() <= 1)


def drawn(n, seed):
    """A disc, a frame, a cross or a stroke on noise, somewhere; small bright squares elsewhere mean nothing."""
    g = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    images = torch.rand(n, 3, SIDE, SIDE, generator=g) * 0.25 + torch.rand(n, 3, 1, 1, generator=g) * 0.4
    labels = torch.randint(0, 4, (n,), generator=g)
    masks = torch.zeros(n, SIDE, SIDE, dtype=torch.bool)
    for i in range(n):
        r = int(torch.randint(4, 6, (1,), generator=g))
        y, x = (int(v) for v in torch.randint(r + 1, SIDE - r - 1, (2,), generator=g))
        masks[i] = shape_of(int(labels[i]), rows - y, columns - x, r)
        images[i][:, masks[i]] = (torch.rand(3, generator=g) * 0.5 + 0.5)[:, None]
        for _ in range(4):
            a, b = (int(v) for v in torch.randint(0, SIDE - 2, (2,), generator=g))
            if not masks[i, max(0, a - 3) : a + 5, max(0, b - 3) : b + 5].any():
                images[i, :, a : a + 2, b : b + 2] = torch.rand(3, 1, 1, generator=g) * 0.5 + 0.5
    return (images - 0.5) / 0.25, labels, masks


def trained():
    torch.manual_seed(0)
    net = VisionTransformer(SIDE, 4, 4, 4, 64, 128, num_classes=4)
    images, labels, _ = drawn(4000, 0)
    n_epochs, steps = 15, 4000 // 64
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=n_epochs * steps)
    for _ in range(n_epochs):
        for rows in torch.randperm(4000).split(64)[:steps]:
            loss = F.cross_entropy(net(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def check_heat(net, n=60):
    """Heat of the predicted class lies on the object (grown by two pixels) at least three times as much as by area."""
    x, labels, masks = drawn(n, 1)
    with torch.no_grad():
        predicted = net(x).argmax(1)
    assert (predicted == labels).float().mean() > 0.9
    near = F.max_pool2d(masks[:, None].float(), 5, 1, 2)[:, 0]
    engine = ExcitationBackprop(net, x[:2], floor=-2.0)
    for contrastive in (True, False):
        heat = engine.maps(x, predicted[:, None], contrastive=contrastive).maps[:, 0]
        share, area = float((heat * near).sum((1, 2)).mean()), float(near.mean())
        assert share > 3 * area, (contrastive, share, area)
        cells = F.avg_pool2d(heat[:, None], 4).flatten(1).argmax(1, keepdim=True)
        hit = F.max_pool2d(masks[:, None].float(), 4).flatten(1).gather(1, cells)
        assert float(hit.mean()) > 0.75  # the hottest patch touches the object; by chance 0.13
    lost = engine.lost(x[:4], [0, 1])
    assert sum(share for layer, share in lost.items() if layer != "cat") < 0.01  # there the class token begins


@pytest.mark.slow
def test_the_heat_of_a_class_token_model_lies_on_the_object():
    check_heat(trained())
