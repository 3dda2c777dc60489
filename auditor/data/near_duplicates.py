"""Near-duplicates: images that are the same picture, also after another size, compression or brightness.

The fingerprint of an image is a difference hash: the image in 16 rows of 17 grey cells, one bit per pair of neighbours
that says whether it grows brighter to the right by more than a step of noise. Distances are counted in bits of 256.
"""

from __future__ import annotations

import torch
from torch import Tensor

from auditor.data.source import Data
from auditor.subject.subject import Subject

ROWS, COLUMNS = 16, 17
STEP = 3 / 255  # of brightness: smaller differences are noise, and would be other bits in a copy
NEAR = (
    11  # bits: of CUB photos, copies at half size and JPEG quality 50 differ by 11 at most, other photos by 12 or more
)
SMALL = 32  # pixels of side below which different images look alike at this size: there only equal hashes count
MOST = 20_000  # fingerprints kept of a fit
CHUNK = 2_000


def fingerprint(images: Tensor) -> Tensor:
    """Return the hashes (n, 256) of images (n, channels, height, width) in [0, 1], as bool.

    >>> fingerprint(torch.linspace(0, 1, 17).expand(1, 3, 16, 17)).sum().item()
    256
    """
    grey = torch.nn.functional.adaptive_avg_pool2d(images.float().mean(1, keepdim=True), (ROWS, COLUMNS))
    return (grey[..., 1:] - grey[..., :-1] > STEP).flatten(1)


def fingerprints(data: Data, subject: Subject, rows: Tensor | None = None) -> Tensor:
    """Return the hashes (images, 256) of a source's readable images, as the subject gets them; ``rows`` is a mask."""
    chosen = data if rows is None else data.only(rows)
    return torch.cat([fingerprint(batch.images) for batch in chosen.batches(subject.preprocessing, 256)])


def near(input_shape: tuple[int, int, int]) -> int:
    """Return the distance in bits up to which two images of this size are the same picture."""
    return NEAR if min(input_shape[1:]) >= SMALL else 0


def nearest(hashes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance in bits from each of ``hashes`` (n, bits) to the nearest of ``others``, and which that is."""
    signs = others.float() * 2 - 1
    distances, where = [], []
    for part in torch.split(hashes.float() * 2 - 1, CHUNK):
        agreement, index = (part @ signs.T).max(1)
        distances.append(((hashes.shape[1] - agreement) / 2).round().long())
        where.append(index)
    return torch.cat(distances), torch.cat(where)


def is_plain(hashes: Tensor) -> Tensor:
    """Return which images have so few differences that their hash says nothing: blank ones are not duplicates."""
    return hashes.sum(1) < NEAR
