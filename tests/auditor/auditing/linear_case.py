"""A linear model whose pixel-wise explanation is known exactly, and a case of the audit made of both."""

import torch
from torch import nn

from auditor.auditing.case import Case, Effort
from auditor.explainers.base import Explainer
from auditor.explainers.explanation import Concept, Explanation, class_scores

SHAPE = (1, 5, 7)
WEIGHTS = 0.15 * torch.linspace(-1, 2, 35)  # small, so that probabilities are not all 0 and 1


class Linear(nn.Module):
    """Logit 0 is w x, logit 1 is its negative."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(35, 2, bias=False)
        with torch.no_grad():
            self.w.weight.copy_(torch.stack([WEIGHTS, -WEIGHTS]))

    def forward(self, x):
        return self.w(x.flatten(1))


class PixelWise(Explainer):
    """Explains pixel by pixel by the weights: exact for the linear model, or ``scale`` of it."""

    kind = "nmf"

    def __init__(self, scale=1.0, reads_model=True, **options):
        super().__init__(**options)
        self.scale, self.reads_model = scale, reads_model

    def fit(self, subject, data, progress=None):
        return self

    def check_subject(self, subject):
        """It needs no fit."""

    def explain(self, subject, images, target=None):
        x = subject.pixels(images)
        with torch.no_grad():
            logits = subject.logits(x)
        targets = self.targets_for(subject, logits, target)
        predictions, scores = class_scores(logits, subject.class_names, targets)
        results = []
        for i, t in enumerate(targets):
            w = subject.module.w.weight[t].detach() if self.reads_model else WEIGHTS * (1 if t == 0 else -1)
            parts = self.scale * w * (x[i].flatten() - 0.5)  # against grey, the mean of what flipping puts in
            bias = float(self.scale * 0.5 * w.sum())
            maps = torch.eye(35).view(35, 5, 7)
            concepts = tuple(Concept(k, str(k), float(x[i].flatten()[k]), float(parts[k]), maps[k]) for k in range(35))
            total = scores[i].logit
            explained = sum(c.contribution for c in concepts)
            results.append(
                Explanation(
                    kind=self.kind, prediction=predictions[i], target=scores[i], target_value=total, concepts=concepts,
                    bias=bias, residual=total - bias - explained,
                )
            )  # fmt: skip
        return results

    def tensors(self):
        return {}

    def restore(self, tensors, state, files):
        pass


def case_of(linear, chosen, explainer, **effort):
    explainer.subject_digest_ = linear.digest
    return Case(linear, explainer, chosen, None, Effort(**{"images": 12, "noise_samples": 2} | effort))
