"""Small networks of several kinds, with images and labels, whose every weight can be tried by hand."""

import itertools

import torch
from torch import nn

from auditor import Subject


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.d = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1, bias=False)

    def forward(self, x):
        return torch.relu(x + self.b(self.c(self.d(torch.relu(x)))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.twice, self.top = nn.Linear(30, 5), nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x):
        h = torch.relu(self.a(x.flatten(1)))
        return self.top(torch.relu(self.twice(torch.tanh(self.twice(h)))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 6, (5, 2), stride=(5, 2))
        self.attention, self.top = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        t = self.patch(x).flatten(2).transpose(1, 2)
        return self.top(self.attention(t, t, t, need_weights=False)[0].mean(1))


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


NETWORKS = {
    "two hidden layers": lambda: perceptron(30, 40, 25, 6),
    "three hidden layers": lambda: perceptron(30, 12, 25, 17, 6),
    "tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(30, 20), nn.Tanh(), nn.Dropout(), nn.Linear(20, 4)),
    "residual": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), Residual(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 4)
    ),
    "tied weights": Tied,
    "attention": Transformer,
}


def subject_of(name: str) -> Subject:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        net = NETWORKS[name]()
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(2)  # away from the flat start, so that ablation matters
    return Subject(net.eval(), input_shape=(1, 5, 6), mean=0.2, std=0.4)


def examples(subject: Subject, n: int = 23):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n, 1, 5, 6, generator=generator), torch.randint(0, subject.n_classes, (n,), generator=generator)
