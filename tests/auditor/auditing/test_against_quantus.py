"""Max-sensitivity and model randomisation as Quantus takes them, of the same explanations: the same numbers.

.venv/bin/python -m pytest tests/auditor/auditing/test_against_quantus.py -m slow
"""

import numpy as np
import pytest
import torch
from torch import nn

from auditor.auditing.explanation_changes import _noise
from auditor.auditing.explanation_quality import take
from auditor.metrics.sequential import even_order
from tests.auditor.auditing.linear_case import SHAPE, PixelWise, case_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # importing quantus alone takes seconds


def contributions(subject, images, targets):
    """The contributions of every pixel, as an image."""
    x = torch.as_tensor(np.asarray(images), dtype=torch.float32).reshape(-1, *SHAPE)
    found = [PixelWise().explain(subject, x[i : i + 1], int(t))[0] for i, t in enumerate(targets)]
    return np.array([[c.contribution for c in e.concepts] for e in found]).reshape(-1, *SHAPE)


def test_max_sensitivity(linear, chosen):
    quantus = pytest.importorskip("quantus")
    case = case_of(linear, chosen, PixelWise(), noise_samples=3, radius=0.1, is_sequential=False)
    ours = take("noise", case)["noise_c2"].per_image
    theirs = []
    for i in range(len(chosen)):
        one, steps = chosen.rows([i]), []

        def moved(arr, indices, one=one, steps=steps, **options):
            step = (one.images + _noise(case, len(steps), one)).clamp(0, 1) - one.images
            steps.append(float(step.double().norm()))
            return arr + step.flatten(1).numpy()

        def change(a, b, steps=steps, **options):
            return (b - a) / steps[-1]  # per change of the image

        metric = quantus.MaxSensitivity(
            nr_samples=3, similarity_func=change, norm_numerator=quantus.norm_func.fro_norm,
            norm_denominator=lambda a: 1.0, perturb_func=moved, disable_warnings=True,
        )  # fmt: skip
        target = chosen.logits[i].argmax().item()
        theirs += metric(
            model=linear.module, x_batch=one.images.numpy(), y_batch=np.array([target]), device="cpu",
            explain_func=lambda model, inputs, targets, **options: contributions(linear, inputs, targets),
        )  # fmt: skip
    assert max(theirs) > 1.05 * min(theirs) > 0
    np.testing.assert_allclose(list(ours), np.array(theirs)[even_order(len(chosen))], rtol=1e-4)  # float32 images


class Shuffling(nn.Linear):
    """Resets its weights by a permutation, as our check does."""

    seed = 0

    def reset_parameters(self):
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for p in self.parameters(recurse=False):
                p.copy_(p.flatten()[torch.randperm(p.numel(), generator=generator)].view_as(p))


def test_model_randomisation(linear, chosen):
    quantus = pytest.importorskip("quantus")
    case = case_of(linear, chosen, PixelWise(), random_stages=1, is_sequential=False)
    ours = take("randomisation", case)["randomisation"].per_image
    linear.module.w.__class__ = Shuffling

    def explained(model, inputs, targets, **options):
        with torch.no_grad():
            before = linear.module.w.weight.clone()
            linear.module.w.weight.copy_(model.w.weight)
            try:
                return contributions(linear, inputs, targets)
            finally:
                linear.module.w.weight.copy_(before)

    metric = quantus.MPRT(
        similarity_func=quantus.correlation_pearson, layer_order="top_down", return_last_correlation=True, abs=False,
        normalise=False, disable_warnings=True,
    )  # fmt: skip
    theirs = metric(
        model=linear.module, x_batch=chosen.images.numpy(), y_batch=chosen.logits.argmax(1).numpy(), device="cpu",
        explain_func=explained,
    )  # fmt: skip
    assert len(set(np.round(theirs, 6))) > 2
    np.testing.assert_allclose(list(ours), np.array(theirs)[even_order(len(chosen))], rtol=0, atol=1e-5)
