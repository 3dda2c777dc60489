"""Peak memory of a fit on 1,000 and on 20,000 images, from an .npz and from a folder: it must not grow.

python tests/benchmarks/bench_memory.py            prints peak resident memory of each, and the ratios
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

FIT = """
import json, resource, sys, torch
from auditor import Subject, fit, open_data
torch.manual_seed(0)
body = torch.nn.Conv2d(3, 32, 3, stride=2), torch.nn.ReLU(), torch.nn.Flatten()
net = torch.nn.Sequential(*body, torch.nn.Linear(32 * 225, 10))
subject = Subject(net, input_shape=(3, 32, 32))
data = open_data(sys.argv[1])
data.digest
fit("nmf", subject, data, layer="1", rank=8, refits=1, max_iter=20, max_eval=100, max_positions=20000)
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
"""


def peak_mb(source: Path) -> float:
    """Fit in a process of its own and return its peak resident memory in MB."""
    done = subprocess.run([sys.executable, "-c", FIT, str(source)], check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout))


def make_npz(path: Path, n: int) -> Path:
    rng = np.random.default_rng(0)
    np.savez(path, images=rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), labels=np.arange(n) % 10)
    return path


def make_folder(path: Path, n: int) -> Path:
    rng = np.random.default_rng(0)
    path.mkdir()
    for i in range(n):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path / f"{i:05d}.png", compress_level=1)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", type=int, default=1_000)
    parser.add_argument("--many", type=int, default=20_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind, make in (("npz", make_npz), ("folder", make_folder)):
            few = peak_mb(make(Path(folder) / f"few-{kind}{'.npz' if kind == 'npz' else ''}", args.few))
            many = peak_mb(make(Path(folder) / f"many-{kind}{'.npz' if kind == 'npz' else ''}", args.many))
            print(
                f"{kind:7} {args.few} images {few:7.0f} MB   {args.many} images {many:7.0f} MB   ratio {many / few:.3f}"
            )


if __name__ == "__main__":
    main()
