"""How `nmf` reads a vision transformer: its class token left as it is, or read with the patches from a mean activation.

    python tests/benchmarks/bench_class_token.py [--store]

A ViT of four blocks (torchvision's, 16 patches) is trained on scikit-learn's digits, and `nmf` of rank 10 is fitted to
the blocks from which patches still reach the logits. ``bias`` is the mean size of what no concept explains, beside the
mean logit of the predicted class; ``f_cls`` of a token that was left alone is 1 by itself: the token has the class.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from auditor import Subject, fit, open_data
from auditor.explainers.nmf.explainer import NmfExplainer

RESULTS = Path(__file__).parent / "results" / "class_token.json"
EPOCHS = 25


class Grey(nn.Module):
    """A network of colour images that is given grey ones."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x.expand(-1, 3, -1, -1))


class TokenLeft(NmfExplainer):
    """The kind as it was: zero is the empty layer, and the class token stays."""

    def _read(self, subject, data, parts):
        self.start_ = None
        return subject.layout(self.layer_)


def trained():
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    net = Grey(VisionTransformer(8, 2, num_layers=4, num_heads=4, hidden_dim=48, mlp_dim=96, num_classes=10))
    nn.init.normal_(net.net.heads.head.weight, std=0.05)
    shape = {"input_shape": (1, 8, 8), "mean": 0.5, "std": 0.5}
    data = open_data("sklearn:digits?split=train")
    parts = [(b.images, b.labels) for b in data.batches(Subject(net.eval(), **shape), 256)]
    x, y = (torch.cat(part) for part in zip(*parts, strict=True))
    adam = torch.optim.AdamW(net.parameters(), 3e-3)
    fall = torch.optim.lr_scheduler.OneCycleLR(adam, 3e-3, EPOCHS * -(-len(x) // 64))
    net.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(64):
            adam.zero_grad()
            F.cross_entropy(net((x[rows] - 0.5) / 0.5), y[rows]).backward()
            adam.step()
            fall.step()
    return Subject(net.eval(), **shape)


def figures(subject, explainer, images):
    explanations = explainer.explain(subject, images)

    def mean(of):
        return round(sum(abs(of(e)) for e in explanations) / len(explanations), 4)

    return {
        "bias": mean(lambda e: e.bias),
        "logit": mean(lambda e: e.target_value),
        "residual": mean(lambda e: e.residual),
        "by_class_token": mean(lambda e: e.extra.get("by_class_token", 0.0)),
        **{k: round(explainer.metrics[k], 4) for k in ("f_cls", "f_reg", "relative_error", "integration_error")},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true")
    args = parser.parse_args()
    subject, data = trained(), open_data("sklearn:digits?split=train")
    test = open_data("sklearn:digits?split=test")
    images = next(test.batches(subject, 100)).images
    with torch.no_grad():
        right = [(subject.logits(b.images).argmax(1) == b.labels).float() for b in test.batches(subject, 256)]
    report = {"accuracy on the test split": round(float(torch.cat(right).mean()), 4)}
    for block in range(3):
        layer = f"net.encoder.layers.encoder_layer_{block}"
        left = TokenLeft(layer=layer, rank=10, refits=1).fit(subject, data)
        read = fit("nmf", subject, data, layer=layer, rank=10, refits=1)
        for how, explainer in (("left as it is", left), ("read", read)):
            report[f"block {block + 1} of 4, class token {how}"] = row = figures(subject, explainer, images)
            print(f"block {block + 1}, token {how}: {row}", flush=True)
    if args.store:
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
