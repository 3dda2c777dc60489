"""DeepFacto on a CNN for MNIST, Fashion-MNIST or CUB: accuracy before and after, and the attribute probe beside others.

python tests/benchmarks/bench_deepfacto.py --data-root DATA [--set MNIST] [--ranks 8 16 32] [--seeds 3] [--images 3000]

A network is trained on part of the training split, then factorized on ``--images`` images of it (every fifth of them
is the validation part on which settings were chosen). All figures are of the test split, which nothing has seen: the
share of right answers of the network as it was and with the factorization inside, the error of the reconstruction, and
a linear SVM on pooled scores (mean and maximum over positions, for each method alike) trained on the same images as the
factorization. On MNIST and Fashion-MNIST the classes stand in for attributes; CUB has 312 per class (above 50 of 100).
PCA and NMF factorize the layer of the network as it was.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from auditor import Subject, fit, open_data
from auditor.attribute_probe import Attributes, pooled_features, principal_scores, probe_accuracy, read_attributes
from auditor.cut import Cut
from auditor.deepfacto_training import activations_of
from auditor.kernels.deepfacto import projected


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 49, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def idx_images(root, name, split, n):
    data = open_data(f"torchvision:{name}?root={root}&split={split}", limit=n)
    probe = Subject(network(), input_shape=(1, 28, 28))
    batches = list(data.batches(probe, 1000))
    return torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])


def trained_network(x, y, epochs, seed=0):
    torch.manual_seed(seed)
    net = network()
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    steps = epochs * (len(x) // 100)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(100)[: len(x) // 100]:
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
            schedule.step()
    return Subject(net.eval(), input_shape=(1, 28, 28), class_names=[str(i) for i in range(10)])


def as_npz(folder, x, y):
    path = Path(folder) / "images.npz"
    np.savez(path, images=x.permute(0, 2, 3, 1).numpy(), labels=y.numpy())
    return open_data(path)


def table(subject, data, layer, seen, unseen, options, args):
    """Print one line per rank: means over the seeds."""
    x, test = seen[0], unseen[0]
    held = torch.cat([torch.zeros(len(x), dtype=torch.bool), torch.ones(len(test), dtype=torch.bool)])
    attributes = Attributes(("label",), torch.cat([seen[1], unseen[1]]).numpy()[:, None])
    if len(seen) > 2:
        both = np.concatenate([seen[2].values, unseen[2].values])
        attributes = Attributes(seen[2].names, both)
    plain = Cut(subject, layer)
    Z = torch.cat([activations_of(plain, x), activations_of(plain, test)])
    with torch.no_grad():
        before = torch.cat([subject.logits(part).argmax(1) for part in test.split(500)])
    accuracy = float((before == unseen[1]).float().mean())
    print(f"layer {layer}, {Z.shape[1]} channels x {Z.shape[2]} positions; network on test {accuracy:.4f}", flush=True)
    names = ("accuracy", "drop", "error", "sparsity", "f_cls", "probe", "nmf", "pca", "valid", "valid nmf", "valid pca")
    print(f"{'rank':>5}" + "".join(f"{n:>11}" for n in names) + "   CPU s")
    for rank in args.ranks:
        rows, began = [], time.process_time()
        pca = probe_accuracy(pooled_features(principal_scores(Z, held, rank)), held, attributes)
        for seed in range(args.seeds):
            e = fit("deepfacto", subject, data, layer=layer, rank=rank, seed=seed, refits=0, **options)
            nmf = fit("nmf", subject, data, layer=layer, rank=rank, seed=seed, init="random", refits=1, max_eval=50)
            cut = Cut(subject, layer, e.weights_)
            f = torch.cat([activations_of(cut, x), activations_of(cut, test)])
            S = e.scores(f)
            right = (e.head_.logits(S[held]).argmax(1) == unseen[1]).float().mean()
            agree = (e.head_.logits(S[held]).argmax(1) == before).float().mean()
            error = (f[held] / e.scale_ - e.M_ @ S[held]).norm() / (f[held] / e.scale_).norm()
            m = e.metrics
            rows.append(
                [
                    float(right),
                    accuracy - float(right),
                    float(error),
                    m["sparsity"],
                    float(agree),
                    probe_accuracy(pooled_features(S), held, attributes),
                    probe_accuracy(pooled_features(projected(Z, nmf.W_)), held, attributes),
                    pca,
                    m["probe_deepfacto"],
                    m["probe_nmf"],
                    m["probe_pca"],
                ]
            )
            if args.verbose:
                print(f"  seed {seed}" + "".join(f"{v:11.4f}" for v in rows[-1]), flush=True)
        mean = torch.tensor(rows).mean(0).tolist()
        spent = time.process_time() - began
        print(f"{rank:5}" + "".join(f"{v:11.4f}" for v in mean) + f"{spent:8.0f}", flush=True)


def cub(args, options):
    """SqueezeNet on 20 classes of CUB; body with ImageNet weights, a linear classifier on pooled features trained."""
    from torchvision.models import squeezenet1_1

    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    root = Path(args.data_root) / "cub20"
    body = squeezenet1_1(weights=None)
    state = torch.load(Path(args.data_root) / "squeezenet1_1_imagenet.pth", weights_only=True)
    body.load_state_dict({k: v.float() for k, v in state.items()})
    train, test = open_data(str(root / "train")), open_data(str(root / "test"))
    net = nn.Sequential(body.features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 20)).eval()
    subject = Subject(net, input_shape=(3, 224, 224), mean=mean, std=std, class_names=list(train.class_names))
    parts = []
    for data in (train, test):
        batches = list(data.batches(subject, 32))
        ids = [i for b in batches for i in b.ids]
        x, y = torch.cat([b.images for b in batches]), torch.cat([b.labels for b in batches])
        parts.append((x, y, read_attributes(root / "class_attributes.csv", ids, y, subject.class_names, 50.0)))
    with torch.no_grad():
        Z = activations_of(Cut(subject, "0"), parts[0][0], 32).mean(-1)
    torch.manual_seed(0)
    head = net[3]
    adam = torch.optim.AdamW(head.parameters(), 2e-3, weight_decay=1e-2)
    for _ in range(80):
        for rows in torch.randperm(len(Z)).split(64):
            adam.zero_grad()
            nn.functional.cross_entropy(head(Z[rows]), parts[0][1][rows]).backward()
            adam.step()
    for p in net.parameters():
        p.requires_grad_(False)
    options |= {"attributes": str(root / "class_attributes.csv"), "threshold": 50.0, "lr": args.lr or 1e-4}
    table(Subject(net, input_shape=(3, 224, 224), mean=mean, std=std, class_names=list(train.class_names)),
          train, "0", parts[0], parts[1], options, args)  # fmt: skip


def main():
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default=os.environ.get("AUDITOR_DATA"))
    parser.add_argument("--set", choices=("MNIST", "FashionMNIST", "CUB"), default="MNIST")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=3000, help="images that are factorized (every fifth validates)")
    parser.add_argument("--train-images", type=int, default=15000, help="images the network is trained on")
    parser.add_argument("--test-images", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--verbose", action="store_true", help="a line per seed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    where = Path(args.data_root or "") / ("cub20" if args.set == "CUB" else args.set)
    if not args.data_root or not where.exists():
        raise SystemExit(f"skipped: no {where.name} under --data-root (or AUDITOR_DATA)")
    options = {"epochs": args.epochs} | ({"lr": args.lr} if args.lr else {})
    if args.set == "CUB":
        cub(args, options)
        return
    x, y = idx_images(args.data_root, args.set, "train", args.train_images)
    test = idx_images(args.data_root, args.set, "test", args.test_images)
    subject = trained_network(x, y, epochs=3)
    with tempfile.TemporaryDirectory() as folder:
        data = as_npz(folder, x[: args.images], y[: args.images])
        table(subject, data, "5", (x[: args.images], y[: args.images]), test, options, args)


if __name__ == "__main__":
    main()
