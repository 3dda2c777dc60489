"""timm architectures through the registry: logged as pt2, explained by ``nmf`` and ``xnn``, served heatmaps and sums.

    python tests/benchmarks/bench_families.py [--families vit swin …] [--dir DIR]          (pip install timm)

Random weights, since what is tried is the mechanics: every family is logged as a pt2 file and loaded again, both kinds
are fitted to noise with structure, attached, loaded once more and asked for an image. A family counts when both kinds
give heatmaps and contributions that add up to the logit, and when those of ``xnn`` share out mass 1 and are the ones
that the module in memory gives. Results are added to results/families.json.

Wanted: 10 of 10.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import live_server as ls
import numpy as np

RESULTS = Path(__file__).parent / "results" / "families.json"
FAMILIES = {  # small members; depth is cut where it repeats the same block
    "vit": ("vit_tiny_patch16_224", {"depth": 3}),
    "deit": ("deit_tiny_distilled_patch16_224", {"depth": 3}),
    "swin": ("swin_tiny_patch4_window7_224", {"depths": (1, 1, 2, 1)}),
    "convnext": ("convnext_atto", {"depths": (1, 1, 2, 1)}),
    "mobilevit": ("mobilevit_xxs", {}),
    "maxvit": ("maxvit_rmlp_pico_rw_256", {}),
    "coatnet": ("coatnet_pico_rw_224", {}),
    "pvt": ("pvt_v2_b0", {"depths": (1, 1, 1, 1)}),
    "poolformer": ("poolformer_s12", {}),
    "efficientformer": ("efficientformer_l1", {}),
    "eva": ("eva02_tiny_patch14_224", {"depth": 3}),
    "mobilevitv2": ("mobilevitv2_050", {}),
    "efficientnet": ("efficientnet_lite0", {}),
    "mobilenetv4": ("mobilenetv4_conv_small", {}),
    "regnet": ("regnety_002", {}),
    "resnet": ("resnet10t", {}),
    "resnext": ("resnext26ts", {}),
    "densenet": ("densenet121", {}),
}
N_CLASSES = 3


def made(name: str, options: dict):
    """Return a network that says all of its classes of some noise, and the shape of its images."""
    import timm
    import torch

    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=N_CLASSES, **options).eval()
    shape = tuple(net.default_cfg["input_size"])
    images = ls.smooth_noise(24, shape[1])
    head = net.get_classifier()
    heads = head if isinstance(head, tuple) else (head,)
    with torch.no_grad():
        x = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
        logits = torch.cat([net((part - 0.5) / 0.25) for part in x.split(8)])
        for linear in heads:  # a distilled network takes the mean of two
            linear.weight.div_(logits.std(0)[:, None])
            linear.bias.sub_(logits.mean(0)).div_(logits.std(0))
    return net, shape, images


def tried(family: str, folder: Path) -> dict:
    """Take one family the whole way; return what came out."""
    import torch

    from auditor import Subject, fit, open_data
    from auditor.explainers.answer import answer_images
    from auditor.plugins import attach, load_subject, log_subject
    from auditor.plugins.registry.attachments import load

    name, options = FAMILIES[family]
    net, shape, images = made(name, options)
    np.savez(folder / f"{family}.npz", images=images, labels=np.arange(len(images)) % N_CLASSES)
    memory = Subject(net, input_shape=shape, mean=0.5, std=0.25)
    uri = log_subject(memory, family, experiment="bench")
    subject, data = load_subject(uri), open_data(str(folder / f"{family}.npz"))
    few = {"nmf": {"rank": 3, "refits": 1, "max_eval": 4}, "xnn": {"n": 2, "max_epochs": 2, "targets": "all"}}
    entry: dict = {"model": name, "shape": list(shape)}
    for kind, settings in few.items():
        attach(fit(kind, subject, data, **settings), uri, kind, subject=subject, attach_anyway=True)
        explainer = load(uri, kind, subject=subject)
        x = torch.from_numpy(images[:1]).permute(0, 3, 1, 2) / 255
        (answer,) = answer_images(subject, {kind: explainer}, x)
        e = answer.explanations[kind]
        maps = [c.heatmap for c in e.concepts if c.heatmap is not None]
        entry[kind] = {
            "layer": explainer.layer_,
            "grid": list(maps[0].shape) if maps else None,
            "heatmaps": f"{len(maps)} of {len(e.concepts)}",
            "adds up": e.gap() < 1e-3,
            "note": next((c.note for c in e.concepts if c.note.startswith("no heatmap")), ""),
        }
        if kind == "xnn" and maps:
            by_module = explainer.heatmaps(memory, x, e.target.index)
            kept = [by_module.maps[0, i] for i, c in enumerate(e.concepts) if c.heatmap is not None]
            gap = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(maps, kept, strict=True))
            entry[kind]["off the module in memory"] = gap
            entry[kind]["mass is 1"] = all(abs(float(m.sum()) - 1) < 1e-3 for m in maps)
    return entry | {"ok": _is_good(entry)}


def _is_good(entry: dict) -> bool:
    heads = entry["xnn"]
    heat = all(entry[kind]["grid"] and entry[kind]["adds up"] for kind in ("nmf", "xnn"))
    return bool(heat and heads["mass is 1"] and heads["off the module in memory"] < 1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    os.environ.update(ls.QUIET)
    folder = args.dir or Path(tempfile.mkdtemp(prefix="bench-families-"))
    ls.use_store(folder)
    for family in args.families:
        began = time.process_time()
        try:
            entry = tried(family, folder)
        except Exception as error:  # whatever stops a family is its result
            entry = {"model": FAMILIES[family][0], "ok": False, "error": f"{type(error).__name__}: {error}"[:400]}
        entry["cpu_s"] = round(time.process_time() - began, 1)
        report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        report[family] = entry
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{family}: {json.dumps(entry)}", flush=True)
    report = json.loads(RESULTS.read_text())
    print(f"{sum(entry['ok'] for entry in report.values())} of {len(report)} families (wanted: all)")


if __name__ == "__main__":
    main()
