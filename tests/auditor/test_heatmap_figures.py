import math

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import LayerError, OptionError, ShapeError
from auditor.explainers.xnn.logit_faithfulness import faithfulness_of
from auditor.gradcam import grad_cam, grad_cam_plus_plus
from auditor.kernels.inpainting import inpaint
from auditor.metrics.locality import context_share, entropy, grid_parts, locality, part_masses, voronoi_parts
from auditor.perturbation.inpainting_test import keep_top, masking_test
from auditor.metrics.orthogonality import correlation, orthogonality, orthogonality_of


def test_orthogonality_known_answer_and_extremes():
    o = orthogonality_of(torch.tensor([[1, 0.5], [0.5, 1]], dtype=torch.float64))
    assert round(o.o1, 6) == 0.166925
    assert abs(o.o2 - 0.287682) < 1e-5  # the floor of 1e-6 on the diagonal
    same = torch.rand(4, 1, 5, 7).expand(4, 3, 5, 7)
    assert abs(orthogonality(same).o1 - (3 - math.sqrt(3))) < 1e-9
    assert 20 < orthogonality(same).o2 < 30  # singular: large, not infinite
    maps = torch.rand(4, 3, 5, 7)
    maps[:, 1] = 0
    assert orthogonality(maps).left_out == 1
    assert orthogonality(torch.zeros(4, 3, 5, 7)) is None
    rows = torch.rand(3, 50, dtype=torch.float64)
    torch.testing.assert_close(correlation(rows), torch.corrcoef(rows))


def test_locality_known_answers():
    assert round(entropy(torch.ones(16)), 6) == 2.772589
    parts = voronoi_parts(torch.tensor([[0.0, 0], [4, 4]]), (5, 5))
    masses = part_masses(torch.ones(5, 5) / 25, parts)
    # the diagonal ties go to the first point, so symmetry holds up to those five pixels
    assert abs(float(masses[0] - masses[1])) <= 5 * float(parts.max()) / 25
    odd = voronoi_parts(torch.tensor([[0.0, 2], [3, 2]]), (5, 4))  # no ties
    m = part_masses(torch.ones(5, 4) / 20, odd)
    assert abs(float(m[0] - m[1])) < 1e-12
    assert locality([None, torch.zeros(5, 5)], parts) is None
    one = torch.zeros(8, 8)
    one[1, 1] = 1
    found = locality([one, None], grid_parts((8, 8)))
    assert found.entropy == 0
    assert found.skipped == 1
    uniform = locality([torch.ones(13, 17)], grid_parts((13, 17)))
    assert 2.7 < uniform.entropy <= math.log(16)


def test_voronoi_puts_everything_outside_the_box_into_context_and_ignores_hidden_points():
    points = torch.tensor([[2.0, 2.0], [math.nan, math.nan], [6.0, 5.0]])
    parts = voronoi_parts(points, (9, 11), box=(1, 1, 8, 6))
    assert parts.shape == (4, 9, 11)
    assert float(parts[1].sum()) == 0
    assert float(parts[0, 2, 2]) == 1
    assert float(parts[:3].sum(0)[0].sum()) == 0
    assert float(parts[3, 0, 0]) == 1
    heat = torch.zeros(9, 11)
    heat[0, 0], heat[3, 3] = 1, 3
    assert context_share(heat, (1, 1, 8, 6)) == 0.25
    assert math.isnan(context_share(heat * 0, (1, 1, 8, 6)))


def test_faithfulness_counts_unchanged_decisions():
    logits = torch.tensor([[2.0, 1, -9], [1.0, 1.5, 0], [0.0, 5, 4], [3.0, 0, 1]])
    f = faithfulness_of(torch.tensor([0.5, 1.2, 0.0, 3.5]), logits, 0, torch.tensor([True, False, False, True]))
    assert f.f_cls == 0.75
    assert abs(f.f_cls_boundary - 2 / 3) < 1e-9  # rows 0, 1 and 3 have the class among their two largest
    assert abs(f.f_reg - (1.5 + 0.2 + 0 + 0.5) / 4) < 1e-6
    assert f.f_cls_positive == 0.5
    assert math.isnan(faithfulness_of(logits[:, 0], logits, 0, torch.zeros(4, dtype=torch.bool)).f_reg_positive)


def laplace(image, known):
    """Solve the Laplace equation on the missing pixels with a dense matrix: plainly right, slow."""
    h, w = image.shape
    A, b = torch.eye(h * w, dtype=torch.float64), image.double().flatten().clone()
    for y in range(h):
        for x in range(w):
            if known[y, x]:
                continue
            near = [(y + j, x + i) for j, i in ((0, 1), (1, 0), (0, -1), (-1, 0)) if 0 <= y + j < h and 0 <= x + i < w]
            for j, i in near:
                A[y * w + x, j * w + i] = -1 / len(near)
            b[y * w + x] = 0
    return torch.linalg.solve(A, b).view(h, w)


def test_inpainting_solves_the_laplace_equation_and_keeps_known_pixels():
    g = torch.Generator().manual_seed(0)
    image = torch.rand(1, 2, 9, 11, generator=g, dtype=torch.float64)
    known = (torch.rand(1, 1, 9, 11, generator=g) < 0.3).double()
    filled = inpaint(image * known, known, sweeps=500)
    for c in range(2):
        torch.testing.assert_close(filled[0, c], laplace((image * known)[0, c], known[0, 0]), rtol=0, atol=1e-4)
    assert torch.equal(filled * known, image * known)
    assert float(inpaint(image, known * 0).abs().sum()) == 0


class Bright(nn.Module):
    """Class 1 when the left half is brighter than the right."""

    def forward(self, x):
        half = x.shape[3] // 2
        score = x[..., :half].mean((1, 2, 3)) - x[..., half:].mean((1, 2, 3))
        return torch.stack([-score, score], 1)


def test_masking_keeps_the_decision_with_the_right_pixels_and_loses_it_with_the_wrong_ones():
    subject = Subject(Bright(), input_shape=(1, 6, 8))
    x = torch.zeros(2, 1, 6, 8)
    x[..., :4] = 1
    right, wrong = torch.zeros(2, 6, 8), torch.zeros(2, 6, 8)
    right[..., 3:5] = 1
    wrong[..., 4:] = 1
    labels = torch.ones(2, dtype=torch.long)
    assert masking_test(subject, x, right, labels, 12).accuracy == 1
    lost = masking_test(subject, x, wrong, labels, 12)
    assert (lost.accuracy, lost.full_accuracy) == (0, 1)
    with pytest.raises(OptionError, match="1 to 48"):
        keep_top(x, right, 0)
    with pytest.raises(ShapeError, match="Upsample"):
        keep_top(x, right[:, :3], 2)


def test_grad_cam_of_a_linear_head_is_the_weighted_sum_of_channels():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    subject = Subject(net, input_shape=(2, 7, 9))
    x = torch.rand(2, 2, 7, 9)
    A = net[:2](x).detach()
    w = net[4].weight[1].detach()
    want = torch.relu((A * w.view(1, 3, 1, 1)).sum(1)) / 35  # the pool shares the gradient over 5 x 7 cells
    torch.testing.assert_close(grad_cam(subject, x, 1, "1"), want)
    g = w.view(1, 3, 1, 1) / 35
    alpha = g**2 / (2 * g**2 + (A * g**3).sum((2, 3), keepdim=True))
    weight = (alpha * torch.relu(g)).expand(-1, -1, 5, 7).sum((2, 3), keepdim=True)
    torch.testing.assert_close(grad_cam_plus_plus(subject, x, 1, "1"), torch.relu((weight * A).sum(1)))
    with pytest.raises(LayerError, match="no positions"):
        grad_cam(subject, x, 1, "3")
