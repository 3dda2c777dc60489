"""Which layer is explained by default: architectures that no rule was tuned on, with random weights.

    PYTHONPATH=… python -m tests.benchmarks.bench_layers [--only resnet50,timm:dla34] [--store]

Weights are random (batch norms have seen noise), so the class is kept by any basis and `faithfulness` says nothing;
what is looked at is whether a layer is found, that it is none that computes nothing, and whether the part above it runs
alone (`above`: closed form, affine, alone, or the whole network for every point of a path integral).
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "layers.json"
TORCHVISION = (
    "mobilenet_v3_small",
    "mobilenet_v2",
    "densenet121",
    "regnet_y_400mf",
    "shufflenet_v2_x1_0",
    "vgg11",
    "vgg11_bn",
    "alexnet",
    "resnet50",
    "efficientnet_b0",
    "convnext_tiny",
    "mnasnet0_5",
    "googlenet",
    "inception_v3",
)
TIMM = (
    "convnext_atto",
    "efficientnet_lite0",
    "regnetx_002",
    "ghostnet_100",
    "mobilenetv3_small_050",
    "dla34",
    "repvgg_a0",
    "edgenext_xx_small",
    "vit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
    "mobilevit_xxs",
    "poolformer_s12",
    "mixer_s32_224",
)


def network(name: str) -> tuple[Any, int]:
    """Return a network with random weights and the side of its images."""
    import torch

    torch.manual_seed(0)
    size = 299 if name == "inception_v3" else 224
    if name.startswith("timm:"):
        import timm

        net = timm.create_model(name.removeprefix("timm:"), pretrained=False)
    else:
        import torchvision

        more = {"googlenet": {"init_weights": False, "aux_logits": False}, "inception_v3": {"init_weights": False}}
        net = getattr(torchvision.models, name)(weights=None, **more.get(name, {}))
    with torch.no_grad():
        net.train()(torch.randn(4, 3, size, size))  # batch norms see something
    return net.eval(), size


def row(name: str) -> dict[str, Any]:
    """Return which layer is suggested and chosen, and what a path integral from it costs."""
    import torch

    from auditor import Subject
    from auditor.explainers.layer_choice import best_layer, measure_layers, random_images
    from auditor.network.above_layer import prepare_above_layer

    net, size = network(name)
    subject = Subject(net, input_shape=(3, size, size))
    began = time.process_time()
    measured = measure_layers(subject, random_images(subject)[:6])
    seconds = time.process_time() - began
    chosen = best_layer(measured) or subject.default_layer()
    layer, above = subject.layer(chosen), prepare_above_layer(subject, chosen)
    how = "alone" if above is not None else "whole network"
    if above is not None and above.is_affine:
        how = "affine"
    if above is not None and above.head is not None:
        how = "closed form"
    return {
        "suggested": subject.default_layer(),
        "chosen": chosen,
        "type": layer.type,
        "shape": list(layer.shape),
        "passive": layer.is_passive,
        "above": how,
        "cost": next(m.cost for m in measured if m.layer.name == chosen),
        "candidates": [m.layer.name for m in measured],
        "seconds": round(seconds, 2),
        "parameters": sum(p.numel() for p in net.parameters()) if isinstance(net, torch.nn.Module) else 0,
    }


def main() -> None:
    """Print one row per architecture; with --store keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated names; timm:NAME for those of timm")
    parser.add_argument("--store", action="store_true", help=f"update {RESULTS.name}")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.only.split(",") if options.only else [*TORCHVISION, *(f"timm:{n}" for n in TIMM)]:
        try:
            rows[name] = row(name)
        except ImportError as error:
            print(f"{name}: skipped, {error}")
            continue
        r = rows[name]
        print(f"{name:34} {r['chosen']} ({r['type']}), {r['above']}, cost {r['cost']:.2f}", flush=True)
        if options.store:
            RESULTS.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
