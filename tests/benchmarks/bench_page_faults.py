"""What page faults cost: CPU time of forward passes at 224, with the allocator as it is and with memory kept.

    python -m tests.benchmarks.bench_page_faults [--model squeezenet1_1] [--images 256]

Each row is a process of its own with one thread, the same images in the same order. ``ratio`` is user + system time
with memory kept over without; ``peak`` is the largest resident set in MB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

CHILD = """
import json, resource, sys
import torch, torchvision
from auditor import Subject
name, size, images = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
subject = Subject(getattr(torchvision.models, name)(), input_shape=(3, 224, 224))
x = torch.rand(size, 3, 224, 224)
with torch.no_grad():
    subject.logits(x)
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(images // size):
        subject.logits(x)
after = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "user": after.ru_utime - before.ru_utime, "system": after.ru_stime - before.ru_stime,
    "faults": after.ru_minflt - before.ru_minflt, "peak": after.ru_maxrss / 1024,
}))
"""


def measured(model: str, size: int, images: int, keep: bool) -> dict[str, float]:
    """Return CPU seconds, faults and peak of one process."""
    environment = {**os.environ, "AUDITOR_KEEP_MEMORY": "1" if keep else "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, model, str(size), str(images)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def main() -> None:
    """Print one row per batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="squeezenet1_1", help="a classifier of torchvision.models")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--sizes", default="8,16,32,64", help="batch sizes")
    options = parser.parse_args()
    print(f"{options.model}, {options.images} images at 224, CPU seconds (user + system), faults in thousands")
    print("batch |  as it is           faults  peak |  memory kept        faults  peak | ratio")
    for size in (int(n) for n in options.sizes.split(",")):
        plain, with_memory = (measured(options.model, size, options.images, keep) for keep in (False, True))
        cells = [
            f"{m['user']:6.2f} + {m['system']:6.2f}  {m['faults'] / 1000:8.0f} {m['peak']:5.0f}"
            for m in (plain, with_memory)
        ]
        ratio = (with_memory["user"] + with_memory["system"]) / (plain["user"] + plain["system"])
        print(f"{size:5} | {cells[0]} | {cells[1]} | {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
