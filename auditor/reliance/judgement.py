"""From measures to words: what each class hangs on, in a sentence with numbers, and how sure that is.

Three answers: *found* (a class follows one thing that is transplanted into other images, and that thing is too small,
too much alike or too far from the middle to be what the class is about), *look* (pictures, no verdict), *nothing*.
A spot that is followed too weakly for a verdict is only worth looking at when the class misses it.
Without masks of the object nothing here says "spurious": it says what the class hangs on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from auditor.metrics.thresholds import FOUND_FROM, LOOK_FROM
from auditor.reliance.hiding import Survival
from auditor.reliance.measures import ClassReliance, Reliance
from auditor.reliance.regions import Boxes
from auditor.reliance.regions import boxes as boxes_of_heat
from auditor.reliance.transplant import Followed

Verdict = Literal["found", "look", "nothing", "skipped"]
# By how much more images of other classes must follow a transplant than its null. What makes it a thing of its own
# counts as much, up to the gain itself: what spots have more in common with each other than boxes elsewhere, and how
# well the texture alone gives the class away. The head of a bird is followed too, at its place more than at another;
# honest models know something of the surroundings. What is laid over the whole image, or always at one place, moves the
# margin of honest models little: there the way that the margin goes counts as much as the gain.
NEEDED = {
    "box": 0.6,
    "best_box": 0.65,
    "spot": 0.81,
    "pattern": 0.4,
    "frame": 0.42,
    "colour": 0.42,
    "spectrum": 0.48,
    "surroundings": 0.88,
}
BY_MARGIN = ("pattern", "frame", "colour", "spectrum", "surroundings")
SPECIFIC = tuple(NEEDED)  # of causes that are about as strong, the first says most
ABOUT_AS_STRONG = 0.8
SPOTS = ("box", "best_box", "spot")
ALIKE_EARLY = 0.35  # by which parts of objects are more alike than boxes elsewhere, in a layer that knows no classes
ALIKE = 0.25  # by which spots in surroundings that are no thing of their own are more alike than boxes elsewhere
SAME_THING = 0.75  # likeness of the best boxes up to which they may be parts of one kind
TELLS_CLASS = 0.8  # area under the curve of the texture alone, as honest classes have it
OUTSIDE = (
    0.2  # by how much the gain of what is not in the middle exceeds the spots' distance from the edge (.5: middle)
)
MIDDLE = 0.3  # distance from the edge from which spots lie where objects are, so that they may well be alike
SCATTERED = 0.57  # entropy of places up to which parts of objects are spread over the frame
ANYWHERE, ONE_PLACE = 0.65, 0.05  # entropy of places from which, or up to which, spots are no part of an object
PER_ENTROPY = 0.9  # what counts per entropy beyond that of parts
PART_OF_SOMETHING = 0.08  # by how much the rings around the spots are more alike than other rings
FALSE_DISCOVERIES = 0.05
PART = LOOK_FROM + 0.05  # the most that a spot scores which may be part of what the class is
TELLS = 0.2  # share of a class's images that must be lost for a hidden region to count
PICTURES = 6
LARGER_SHARE = 4.0  # hiding 10% is named instead of 3% where it takes 28 points more away

WITH_BOX = ("box", "best_box", "spot", "pattern")
THINGS = {
    "box": "one small spot",
    "best_box": "one small spot of some of its images",
    "spot": "one small spot at its place",
    "pattern": "something that is always at the same place of the frame",
    "frame": "the edge of the frame",
    "colour": "the tint of the whole image",
    "surroundings": "the surroundings",
    "spectrum": "the fine texture of the whole image",
}
NULLS = {
    "box": "another spot of the same images:",
    "best_box": "another spot of such images:",
    "spot": "another spot, or none:",
    "pattern": "that of mixed classes, or none:",
    "frame": "the edge of another picture, or none:",
    "colour": "that of another picture:",
    "surroundings": "those of another picture, or none:",
    "spectrum": "that of another picture:",
}
SPOT_ADVICE = (
    "Look at the spots: if they are not part of what the class is, remove them from the training images or balance them"
    " over the classes, and train again."
)
ADVICE = {
    "box": SPOT_ADVICE,
    "best_box": SPOT_ADVICE,
    "spot": SPOT_ADVICE,
    "pattern": "Look at the same place in all images: a mark, a date, a device. Hide it everywhere and train again.",
    "frame": "Look at the edges: crop them, or give all classes the same edge, and train again.",
    "colour": "Ask how the images of this class were taken and stored; train with tints varied at random.",
    "surroundings": "Collect the class in other surroundings, or train with the background replaced.",
    "spectrum": "Ask how the images of this class were taken, stored and resized: treat all alike and train again.",
}


@dataclass(frozen=True)
class Finding:
    """What one class hangs on; ``rows`` are up to six images, ``boxes`` the deciding boxes of these where one exists.

    ``cause`` is the transplant that the class follows: box, best_box, spot, pattern, frame, colour, surroundings or
    spectrum.
    """

    label: int
    name: str
    verdict: Verdict
    score: float
    cause: str = ""
    sentence: str = ""
    advice: str = ""
    rows: tuple[int, ...] = ()
    boxes: Boxes | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON; a box is [top, left, height, width, share of heat] in pixels of the input."""
        return {
            "label": self.label,
            "name": self.name,
            "verdict": self.verdict,
            "score": None if math.isnan(self.score) else self.score,
            "cause": self.cause,
            "sentence": self.sentence,
            "advice": self.advice,
            "rows": list(self.rows),
            "boxes": None if self.boxes is None else self.boxes.to_json(),
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Finding:
        """Restore what ``to_json`` gave."""
        boxes = entry.get("boxes")
        return cls(
            int(entry["label"]),
            str(entry["name"]),
            entry["verdict"],
            math.nan if entry["score"] is None else float(entry["score"]),
            str(entry.get("cause", "")),
            str(entry.get("sentence", "")),
            str(entry.get("advice", "")),
            tuple(int(r) for r in entry.get("rows", ())),
            None if boxes is None else Boxes.from_json(boxes),
        )


def judge(reliance: Reliance, class_names: Sequence[str] | None = None) -> tuple[Finding, ...]:
    """Return one finding per class, worst first; skipped classes last.

    A class is found where the evidence is strong and the gain is a discovery among all classes. Where the model is
    hardly better than chance, nothing is found: what its classes follow is then worth looking at, and no more.
    """
    names = list(class_names) if class_names is not None else [c.name for c in reliance.classes]
    measured = [c for c in reliance.classes if not c.skipped]
    significant = discoveries([p_value(c) for c in measured], FALSE_DISCOVERIES)
    by_chance = reliance.is_right_by_chance
    out = [_finding(c, names, sure and not by_chance) for c, sure in zip(measured, significant, strict=True)]
    if by_chance:
        out = [replace(f, sentence=f"{f.sentence} {_about_chance(reliance)}") for f in out]
    out.sort(key=lambda f: -f.score)
    for c in reliance.classes:
        if c.skipped:
            sentence = f"Class {names[c.label]} was not measured: {c.skipped}."
            out.append(Finding(c.label, names[c.label], "skipped", math.nan, sentence=sentence))
    return tuple(out)


def _about_chance(reliance: Reliance) -> str:
    return (
        f"The model is right on {reliance.accuracy:.0%} of these images, about as often as by chance"
        f" ({reliance.chance:.0%}): give images of its task, or train it first."
    )


def _finding(c: ClassReliance, names: Sequence[str], significant: bool) -> Finding:
    evidence = evidence_of(c)
    strongest = max(evidence.values())
    within = {k: v for k, v in evidence.items() if k != "surroundings"}  # what lies in them says more than they do
    named = within if max(within.values(), default=0.0) >= FOUND_FROM else evidence
    cause = next(k for k in SPECIFIC if k in named and named[k] >= ABOUT_AS_STRONG * max(named.values()))
    score = strongest if named is within else evidence[cause]
    verdict: Verdict = "nothing"
    if strongest >= LOOK_FROM:
        verdict = "found" if strongest >= FOUND_FROM and significant else "look"
    is_weak = strongest < FOUND_FROM and strongest != PART  # of a part it is not known how strong it is
    if verdict == "look" and cause in SPOTS and is_weak and not is_missed(c):
        verdict = "nothing"
    if verdict == "nothing":
        return Finding(c.label, names[c.label], verdict, strongest, "", f"Class {names[c.label]}: nothing was found.")
    rows, boxes = pictures(c, cause)
    sentence, advice = words(c, cause, names, verdict)
    return Finding(c.label, names[c.label], verdict, score, cause, sentence, advice, rows, boxes)


def evidence_of(c: ClassReliance) -> dict[str, float]:
    """Return for each cause how strong its evidence is, 0 to 1: .5 where the gain is just what is needed.

    A spot that lies in the middle and has alike surroundings may be part of what the class is (an eye in a head): it is
    worth looking at, and no more. Objects are where people point cameras at: spots that are anywhere in the frame, or
    always at the very same place, are no part of one.
    """
    apart = max(thing_of_its_own(c), PER_ENTROPY * (c.place_entropy - SCATTERED))
    more = {"box": apart, "best_box": apart, "spectrum": c.spectrum_leak - TELLS_CLASS}
    more["spot"] = 0.0 if c.edge_distance > MIDDLE else likeness_of(c)
    more["surroundings"] = likeness_of(c) - ALIKE  # a spot that lies in them, of which the box holds a part only
    evidence = {}
    for name, f in c.followed.items():
        if name in NEEDED:
            strength = strength_of(name, f)
            bonus = min(max(0.0, more.get(name, 0.0)), max(strength, 0.0))
            evidence[name] = _scaled(strength + bonus, NEEDED[name])
    if is_part_of_something(c) and not is_outside(c):
        evidence |= {name: min(evidence[name], PART) for name in SPOTS if name in evidence}
    return evidence


def strength_of(name: str, f: Followed) -> float:
    """Return how far the class follows a transplant: the gain, or the mean of it and of the way the margin goes."""
    return float(_strengths(name, f).mean())


def _strengths(name: str, f: Followed) -> Tensor:
    """Return the same per receiver. What images fall back to when something is taken from them counts less."""
    gains = f.hits - f.stronger_null
    if name not in BY_MARGIN or f.carried is None:
        return gains
    falls_back = max(0.0, float(f.stronger_null.mean() - f.null.mean()))
    return (gains + (1 - falls_back) * f.carried) / 2


def thing_of_its_own(c: ClassReliance) -> float:
    """Return by how much the best boxes are more alike than parts of one kind are, in pixels or in an early layer."""
    alike = 0.0 if c.trial is None else float(c.trial.sameness.mean()) - SAME_THING
    if c.sameness_early is None or c.sameness_early_null is None:
        return alike
    return max(alike, float(c.sameness_early.mean() - c.sameness_early_null.mean()) - ALIKE_EARLY)


def likeness_of(c: ClassReliance) -> float:
    """Return by how much the deciding boxes are more alike than boxes elsewhere."""
    if c.sameness is None or c.sameness_null is None:
        return 0.0
    return max(thing_of_its_own(c), float(c.sameness.mean() - c.sameness_null.mean()))


def _scaled(value: float, needed: float) -> float:
    score = 0.5 * value / needed if value < needed else 0.5 + 0.5 * (value - needed) / (1 - needed)
    return min(1.0, max(0.0, score))


def is_part_of_something(c: ClassReliance) -> bool:
    """Whether what is around the boxes is more alike than what is around boxes elsewhere."""
    if c.context is None or c.context_null is None:
        return False
    return float(c.context.mean() - c.context_null.mean()) > PART_OF_SOMETHING


def is_outside(c: ClassReliance) -> bool:
    """Whether the spots do not lie on an object: anywhere, at one place, or near the edge and followed from there."""
    if not math.isnan(c.place_entropy) and not ONE_PLACE < c.place_entropy < ANYWHERE:
        return True
    gains = [c.followed[name].gain for name in ("surroundings", "pattern", "frame") if name in c.followed]
    return max(gains, default=0.0) - c.edge_distance >= OUTSIDE


def is_missed(c: ClassReliance) -> bool:
    """Whether the class loses images when its deciding region is hidden; yes where that was not tried."""
    _, after, elsewhere = most_telling(c.hidden)
    return not c.hidden or elsewhere - after >= TELLS


def standard_error(values: Tensor) -> float:
    """Return the standard error of a mean over receivers; half a hit is added, so that it is never zero."""
    n = len(values)
    variance = float(values.var(unbiased=False)) if n > 1 else 0.25
    return math.sqrt((variance + 0.5 / n) / n)


def p_value(c: ClassReliance) -> float:
    """Return the chance of the largest gain of the class under no gain, corrected for the number of transplants."""
    tested = [_strengths(name, f) for name, f in c.followed.items() if name in NEEDED]
    z = max(float(values.mean()) / standard_error(values) for values in tested)
    return min(1.0, len(c.followed) * 0.5 * math.erfc(z / math.sqrt(2)))


def discoveries(p_values: Sequence[float], rate: float) -> list[bool]:
    """Return which p values are discoveries at a false discovery rate, by the step-up rule [BenjaminiHochberg].

    >>> discoveries([0.01, 0.9, 0.02, 0.04], 0.05)
    [True, False, True, False]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    last = max((k for k, i in enumerate(order, 1) if p_values[i] <= rate * k / len(order)), default=0)
    chosen = set(order[:last])
    return [i in chosen for i in range(len(p_values))]


def pictures(c: ClassReliance, cause: str) -> tuple[tuple[int, ...], Boxes | None]:
    """Return up to six images of the class whose boxes look most like the others', with these boxes if there are any.

    The boxes of something that is always at the same place are widened to all of it: a model may read one letter.
    """
    if c.boxes is None or c.sameness is None or cause not in WITH_BOX:
        return c.rows[:PICTURES], None
    if cause == "best_box" and c.trial is not None:
        best = torch.arange(min(PICTURES, len(c.trial.rows)))
        return tuple(c.rows[i] for i in c.trial.rows[best].tolist()), c.trial.boxes.rows(best)
    best = torch.argsort(c.sameness, descending=True, stable=True)[:PICTURES]
    at = c.boxes.rows(best)
    pattern = c.followed.get("pattern")
    if pattern is not None and c.divergence is not None and strength_of("pattern", pattern) >= NEEDED["pattern"]:
        of_pattern = boxes_of_heat(c.divergence[None]).rows(torch.zeros_like(best))
        joined = at.joined_with(of_pattern)
        # boxes that are apart from the pattern show something else
        at = joined.where(_touch(at, of_pattern), of_pattern) if cause == "pattern" else joined
    return tuple(c.rows[i] for i in best.tolist()), at


def _touch(a: Boxes, b: Boxes) -> Tensor:
    """Return whether the boxes of two rows meet."""
    tall = (a.top <= b.top + b.height) & (b.top <= a.top + a.height)
    return tall & (a.left <= b.left + b.width) & (b.left <= a.left + a.width)


def most_telling(hidden: Sequence[Survival]) -> tuple[float, float, float]:
    """Return the share of the image to name, what survives without it, and what survives the same elsewhere.

    Survival is the median over the fills of a share; a larger share must take more away to be worth naming.
    """
    by_share: dict[float, list[Survival]] = {}
    for s in hidden:
        by_share.setdefault(s.share, []).append(s)
    rows = [
        (share, statistics.median(float(s.still.mean()) for s in some), float(some[0].still_moved.mean()))
        for share, some in by_share.items()
    ]
    return min(rows, key=lambda row: row[1] - row[2] + LARGER_SHARE * row[0], default=(0.0, 1.0, 1.0))


def words(c: ClassReliance, cause: str, names: Sequence[str], verdict: Verdict) -> tuple[str, str]:
    """Return the sentence and the advice for a class that follows ``cause``."""
    name = names[c.label]
    others = [n for i, n in enumerate(names) if i != c.label]
    other = others[0] if len(others) == 1 else "other classes"
    f = c.followed[cause]
    if verdict == "look":
        part = ", which may be part of what it shows" if cause in WITH_BOX and is_part_of_something(c) else ""
        return f"Class {name} may hang on {THINGS[cause]}{part}: look at these pictures.", ADVICE[cause]
    turned = f"{float(f.hits.mean()):.0%} into {name} ({NULLS[cause]} {float(f.stronger_null.mean()):.0%})"
    if f.carried is not None and strength_of(cause, f) > f.gain:
        way = f"{float(f.carried.mean()):.0%} of the way to {name}"
        turned = f"moves them {way} on average and turns {turned}"
    else:
        turned = f"turns {turned}"
    if cause not in WITH_BOX:
        return f"Class {name} hangs on {THINGS[cause]}: given to pictures of {other}, it {turned}.", ADVICE[cause]
    parts = [f"Class {name} hangs on {THINGS[cause]}: "]
    share, after, elsewhere = most_telling(c.hidden)
    if elsewhere - after >= TELLS:  # a class that images fall back to survives without it
        parts.append(
            f"hiding {share:.0%} of each image takes it from 100% to {after:.0%} (elsewhere: {elsewhere:.0%}); "
        )
    parts.append(f"pasted into pictures of {other}, it {turned}")
    if c.sameness is not None and c.sameness_null is not None:
        likeness, apart = float(c.sameness.mean()), float(c.sameness_null.mean())
        if likeness - apart >= 0.1:
            parts.append(f"; the spots look alike ({likeness:.2f}, elsewhere {apart:.2f})")
    return "".join(parts) + ".", ADVICE[cause]
