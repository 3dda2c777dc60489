"""A class's reliance as metrics: every measure with its interval over images and its null."""

from __future__ import annotations

from auditor.metrics.measure import Measure, of_items, of_value, skipped
from auditor.reliance.fills import FILLS
from auditor.reliance.measures import ClassReliance


def metrics_of(c: ClassReliance, seed: int = 0) -> dict[str, Measure]:
    """Return the class's numbers as measures with intervals over images and their nulls."""
    if c.skipped:
        return {"transplant_box": skipped(c.skipped, "down")}
    out: dict[str, Measure] = {}
    for s in c.hidden:
        label = f"necessity_{s.share * 100:g}_{s.fill}"
        out[label] = of_items(1 - s.still, "down", null=float(1 - s.still_moved.mean()), seed=seed)
        out[f"margin_without_{s.share * 100:g}_{s.fill}"] = of_items(
            s.margin, "none", null=float(s.margin_moved.mean()), seed=seed
        )
        if s.still_scattered is not None and s.fill == FILLS[0]:
            out[f"necessity_{s.share * 100:g}_scattered"] = of_items(1 - s.still_scattered, "none", seed=seed)
    for s in c.alone:
        out[f"sufficiency_{s.share * 100:g}"] = of_items(s.still, "none", null=float(s.still_moved.mean()), seed=seed)
    for name, f in c.followed.items():
        out[f"transplant_{name}"] = of_items(f.hits, "down", null=float(f.stronger_null.mean()), seed=seed)
    assert c.sameness is not None
    assert c.sameness_null is not None
    out["sameness"] = of_items(c.sameness, "down", null=float(c.sameness_null.mean()), seed=seed)
    if c.sameness_early is not None and c.sameness_early_null is not None:
        null = float(c.sameness_early_null.mean())
        out["sameness_early"] = of_items(c.sameness_early, "down", null=null, seed=seed)
    out["edge_distance"] = of_value(c.edge_distance, "none", n=c.n, null=c.edge_distance_null)
    out["place_entropy"] = of_value(c.place_entropy, "up", n=c.n, null=c.place_entropy_null)
    out["colour_leak"] = of_value(c.colour_leak, "down", n=c.n, null=0.5)
    out["spectrum_leak"] = of_value(c.spectrum_leak, "down", n=c.n, null=0.5)
    out["pattern_leak"] = of_value(c.pattern_leak, "down", n=c.n, null=0.5)
    return out
