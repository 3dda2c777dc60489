"""A study whose order of conditions is known before: what each condition shows of a class is drawn in.

An image of class k is grey noise with a faint bright corner, its heatmap lies in the corner of the class four times in
five and anywhere else otherwise, its contributions name the class but for a little noise. So whoever groups by what a
page shows does worst with nothing, better with one heatmap, best with contributions; the order is
``none < one-heatmap < parts``.
"""

import io

import numpy as np
from PIL import Image

from auditor.study.design import DrawnData, DrawnImage, Study, checked_config
from auditor.study.pictures import practice_pictures

CONDITIONS = ("none", "one-heatmap", "parts")
SIDE, CORNER = 48, 20  # pixels
FAINT, NOISE = 0.13, 0.25  # of the corner and of the noise, of a range of 1
HEAT_IS_RIGHT = 0.8


def planted_study(seed=0, *, names=("first", "second")):
    """Return the study and its pictures."""
    config = checked_config(name="planted", conditions=CONDITIONS, seed=seed, sets=4, per_batch=10, n_classes=4)
    rng = np.random.default_rng(seed)
    images, pictures, data = {}, {}, []
    for n, name in enumerate(names):
        sets = []
        for s in range(config.sets):
            keys = [f"{n}{s}{i:02d}" for i in rng.permutation(config.per_batch)]
            for i, key in enumerate(keys):
                k = (i + s) % config.n_classes
                values = 0.5 * (np.arange(4) == k) + rng.normal(0, 0.08, 4)
                where = k if rng.random() < HEAT_IS_RIGHT else int(rng.integers(4))
                pictures[f"image/{key}"] = _png(_image(rng, k))
                pictures[f"heat/{key}/one-heatmap/0"] = _heat(where)
                pictures |= {f"heat/{key}/parts/{slot}": _heat(slot) for slot in range(4)}
                heats = {"one-heatmap": [True], "parts": [True] * 4}
                images[key] = DrawnImage("abcd"[k], "abcd"[k], key, {"parts": np.round(values, 4).tolist()}, heats)
            sets.append(tuple(keys))
        slots = {
            "one-heatmap": {"n": 1, "by_rank": False, "contributions": False, "labels": []},
            "parts": {"n": 4, "by_rank": False, "contributions": True, "labels": []},
        }
        about = (name, f"drawn:{name}", "d" * 64, f"models:/{name}/1", "m" * 64, tuple("abcd"), "drawn", tuple(sets))
        data.append(DrawnData(*about, slots, (SIDE, SIDE)))
    practice = practice_pictures(config.n_classes)
    pictures |= {f"image/{key}": png for key, png in practice.items()}
    return Study(config, tuple(data), images, tuple(practice)), pictures


def _corner(k):
    """Return the mask of a corner: 0 and 1 above, 2 and 3 below."""
    mask = np.zeros((SIDE, SIDE))
    rows = slice(2, 2 + CORNER) if k < 2 else slice(-2 - CORNER, -2)
    columns = slice(2, 2 + CORNER) if k % 2 == 0 else slice(-2 - CORNER, -2)
    mask[rows, columns] = 1
    return mask


def _image(rng, k):
    grey = 0.5 + rng.normal(0, NOISE, (SIDE // 8, SIDE // 8)).repeat(8, 0).repeat(8, 1) + FAINT * _corner(k)
    return np.repeat((grey.clip(0, 1) * 255).astype(np.uint8)[:, :, None], 3, 2)


def _heat(k):
    rgba = np.zeros((SIDE, SIDE, 4), np.uint8)
    rgba[..., 0] = 255
    rgba[..., 3] = (_corner(k) * 200).astype(np.uint8)
    return _png(rgba)


def _png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()
