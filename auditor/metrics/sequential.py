"""Sequential sampling: images are added in rounds until the interval of a mean lies on one side of every limit.

After each round the two-sided Student interval of the mean at level  1 - ALPHA / rounds  is taken (Bonferroni over the
looks, so that looking several times does not make a wrong stop likelier than ALPHA in all). When it holds none of the
limits on which a verdict hangs, more images would hardly change the verdict, and the sampling stops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.stats import t as student
from torch import Tensor

ALPHA = 0.01
FIRST, GROWTH = 12, 1.8
GOLDEN = (math.sqrt(5) - 1) / 2


def looks(most: int, first: int = FIRST) -> list[int]:
    """Return how many images there are after each round, at last ``most``.

    >>> looks(40), looks(100), looks(7)
    ([12, 22, 40], [12, 22, 40, 72, 100], [7])
    """
    sizes = [min(first, most)]
    while sizes[-1] < most:
        sizes.append(min(most, max(sizes[-1] + 1, math.ceil(round(sizes[-1] * GROWTH, 6)))))
    if len(sizes) > 1 and most < 1.3 * sizes[-2]:  # a last round of a few images decides nothing
        del sizes[-2]
    return sizes


def is_settled(values: Tensor, limits: Sequence[float], n_looks: int) -> bool:
    """Whether the interval of the mean of ``values`` (n,) lies on one side of every limit; NaN never settles.

    >>> from torch import tensor
    >>> is_settled(tensor([0.5, 0.6] * 6), [0.9], 3), is_settled(tensor([0.5, 0.6] * 6), [0.56], 3)
    (True, False)
    """
    x = values.double()
    n = len(x)
    if n < 2 or not bool(x.isfinite().all()):
        return False
    half = float(student.ppf(1 - ALPHA / (2 * n_looks), n - 1)) * float(x.std()) / math.sqrt(n)
    return all(abs(float(x.mean()) - limit) > half for limit in limits)


def even_order(n: int) -> list[int]:
    """Return the rows 0 to n - 1 in an order of which every beginning is spread evenly over all of them.

    Row i comes by the fractional part of  i (sqrt(5) - 1) / 2,  a sequence of low discrepancy.

    >>> even_order(5)
    [0, 2, 4, 1, 3]
    """
    return sorted(range(n), key=lambda i: (i * GOLDEN) % 1.0)
