import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import OptionError, ShapeError
from auditor.perturbation.inpainting_test import inpaint, keep_top, masking_test


def laplace(image, mask):
    """Solve the Laplace equation on the missing pixels with a dense matrix: plainly right, slow."""
    h, w = image.shape
    A, b = torch.eye(h * w, dtype=torch.float64), image.double().flatten().clone()
    for y in range(h):
        for x in range(w):
            if mask[y, x]:
                continue
            near = [(y + j, x + i) for j, i in ((0, 1), (1, 0), (0, -1), (-1, 0)) if 0 <= y + j < h and 0 <= x + i < w]
            for j, i in near:
                A[y * w + x, j * w + i] = -1 / len(near)
            b[y * w + x] = 0
    return torch.linalg.solve(A, b).view(h, w)


def test_inpainting_solves_the_laplace_equation_and_keeps_known_pixels():
    g = torch.Generator().manual_seed(0)
    image = torch.rand(1, 2, 9, 11, generator=g, dtype=torch.float64)
    mask = (torch.rand(1, 1, 9, 11, generator=g) < 0.3).double()
    filled = inpaint(image * mask, mask, sweeps=500)
    for c in range(2):
        torch.testing.assert_close(filled[0, c], laplace((image * mask)[0, c], mask[0, 0]), rtol=0, atol=1e-4)
    assert torch.equal(filled * mask, image * mask)
    assert float(inpaint(image, mask * 0).abs().sum()) == 0


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
