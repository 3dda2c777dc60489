import numpy as np
import torch

from auditor.explainers.coupled.figures import concept_bars, eigenvalue_plot


def test_figures_are_drawn_from_what_is_given():
    values = torch.tensor([2.0, 0.7, 0.3])
    one, other = eigenvalue_plot([("layer1", values)]), eigenvalue_plot([("layer1", values.flip(0))])
    assert one.size == other.size
    assert np.any(np.asarray(one) != np.asarray(other))
    red = np.array([214, 39, 40])
    bars = np.asarray(concept_bars([0.1, 0.8, 0.1], 1))
    assert (bars == red).all(-1).sum() > 3 * (np.asarray(concept_bars([0.1, 0.1, 0.8], 1)) == red).all(-1).sum()
