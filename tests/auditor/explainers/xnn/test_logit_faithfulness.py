import math

import torch

from auditor.explainers.xnn.logit_faithfulness import faithfulness_of, with_heads


def test_faithfulness_counts_unchanged_decisions():
    logits = torch.tensor([[2.0, 1, -9], [1.0, 1.5, 0], [0.0, 5, 4], [3.0, 0, 1]])
    f = faithfulness_of(torch.tensor([0.5, 1.2, 0.0, 3.5]), logits, 0, torch.tensor([True, False, False, True]))
    assert f.f_cls == 0.75
    assert abs(f.f_cls_boundary - 2 / 3) < 1e-9  # rows 0, 1 and 3 have the class among their two largest
    assert abs(f.f_reg - (1.5 + 0.2 + 0 + 0.5) / 4) < 1e-6
    assert f.f_cls_positive == 0.5
    assert math.isnan(faithfulness_of(logits[:, 0], logits, 0, torch.zeros(4, dtype=torch.bool)).f_reg_positive)


def test_all_heads_stand_in_together():
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0]])
    ybar = torch.tensor([[0.5, 0.0], [4.0, 5.0]])
    replaced = with_heads(ybar, logits, [0, 2])
    assert replaced.tolist() == [[0.5, 1.0, 4.0], [0.0, 3.0, 5.0]]
    assert logits[0, 0] == 2.0
