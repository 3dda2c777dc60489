"""Fitted images: which rows of its data a fit used, and for what.

``learn``   the explainer was computed from them;
``choose``  they decided between candidates: the best epoch, the rank, a calibrated limit (learned rows may do so too);
``report``  nothing but the metrics of the fit was measured on them.

A fit counts the images that it reads, in their order; `Explainer.record_fit` stores the rows of the whole source that
these are, so that the record holds for any part of it and beside broken images. A row without a role was not used. What
is neither learned from nor chosen on is held out: only there a measure says how the explainer does on images it does
not know.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auditor.errors import DataError, ShapeError, TamperError

log = logging.getLogger(__name__)

PREFIX = "fitted_images."  # of tensor names in an artifact; no kind may use it
Array = np.ndarray[Any, Any]

ROLES = ("learn", "choose", "report")
FEW = 20  # images of a part below which its figures are little more than chance


@dataclass(frozen=True, slots=True, eq=False)
class FittedImages:
    """One mask (rows,) of bool per role; ``report`` shares no row with the others."""

    learn: Tensor
    choose: Tensor
    report: Tensor

    def __post_init__(self) -> None:
        masks = [self.learn, self.choose, self.report]
        if any(m.dtype != torch.bool or m.dim() != 1 or m.shape != self.learn.shape for m in masks):
            what = ", ".join(f"{m.dtype} {tuple(m.shape)}" for m in masks)
            raise ShapeError(f"fitted images: want three masks (rows,) of bool, got {what}.")
        if bool((self.report & self.used).any()):
            n = int((self.report & self.used).sum())
            raise ShapeError(
                f"fitted images: {n} rows to report on were learned from or chosen on, so their metrics would not be "
                "of held-out images; give each row to one part."
            )

    @classmethod
    def each(cls, n: int, every: int, *, choose: bool = False) -> FittedImages:
        """Hold out each ``every``-th of ``n`` rows to report on; with ``choose`` every second of these to choose on.

        >>> parts = FittedImages.each(12, 3, choose=True)
        >>> parts.report.nonzero()[:, 0].tolist(), parts.choose.nonzero()[:, 0].tolist()
        ([2, 8], [5, 11])
        """
        row = torch.arange(n)
        held = row % every == every - 1
        chosen = held & (row // every % 2 == 1) if choose else torch.zeros_like(held)
        return cls(~held, chosen, held & ~chosen)

    @classmethod
    def of_rows(cls, n: int, **rows: Tensor) -> FittedImages:
        """Make the record of ``n`` rows from row numbers per role: ``of_rows(9, learn=torch.arange(6))``."""
        masks = {role: torch.zeros(n, dtype=torch.bool) for role in ROLES}
        for role, numbers in rows.items():
            masks[role][numbers] = True
        return cls(**masks)

    def __len__(self) -> int:
        return len(self.learn)

    @property
    def used(self) -> Tensor:
        """Rows that the explainer depends on."""
        return self.learn | self.choose

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows of every role."""
        return {role: int(getattr(self, role).sum()) for role in ROLES}

    def first(self, n: int) -> FittedImages:
        """Return the record of the first ``n`` rows."""
        return FittedImages(self.learn[:n], self.choose[:n], self.report[:n])

    def rows(self, rows: Tensor | slice) -> FittedImages:
        """Return the record of some rows, by a slice, a mask or row numbers."""
        return FittedImages(self.learn[rows], self.choose[rows], self.report[rows])

    def among(self, drawn: Tensor) -> FittedImages:
        """Return the record of all rows when these are the rows that the mask ``drawn`` selects, in order.

        >>> FittedImages.each(2, 2).among(torch.tensor([False, True, False, True])).learn.tolist()
        [False, True, False, False]
        """
        if bool(drawn.all()):
            return self
        masks = {role: torch.zeros(len(drawn), dtype=torch.bool) for role in ROLES}
        for role, mask in masks.items():
            mask[drawn] = getattr(self, role)
        return FittedImages(**masks)

    def within(self, rows: Array, n: int) -> FittedImages:
        """Return the record of a source of ``n`` rows when these are the first that were read of ``rows``, in order.

        >>> FittedImages.each(2, 2).within(np.array([1, 3, 4]), 5).report.nonzero()[:, 0].tolist()
        [3]
        """
        k = min(len(self), len(rows))
        read = torch.from_numpy(np.asarray(rows, dtype=np.int64)[:k])
        return FittedImages.of_rows(n, **{role: read[getattr(self, role)[:k]] for role in ROLES})

    def held_out(self, rows: Array) -> Tensor:
        """Return which of these rows of the source the explainer does not depend on."""
        return ~self.used[torch.from_numpy(np.asarray(rows, dtype=np.int64))]

    def held_out_in_order(self, n: int) -> Tensor:
        """Return the same of ``n`` images that can be read, for a record of an earlier release, which counted those."""
        if n < len(self):
            raise DataError(
                f"the fit could read {len(self)} images of this data and {n} can be read now, so it is not known which "
                "of them it used; audit on other data, or where the images can be read."
            )
        free = torch.ones(n, dtype=torch.bool)
        free[: len(self)] = ~self.used
        return free

    def warn_if_few(self, kind: str, choice: str) -> None:
        """Say how large the parts are; a warning when one of them is too small to be relied on."""
        n = self.counts
        small = [role for role in ("choose", "report") if n[role] < FEW]
        log.log(
            logging.WARNING if small else logging.INFO,
            "%s: %d images to learn from, %d to choose %s, %d for the metrics%s",
            kind, n["learn"], n["choose"], choice, n["report"],
            f"; fewer than {FEW} say little, give more images" if small else "",
        )  # fmt: skip

    # on disk

    def tensors(self) -> dict[str, Tensor]:
        """Return the masks as packed bits, eight rows per byte: ten million rows take 1.25 MB per role."""
        packed = {role: np.packbits(getattr(self, role).numpy()) for role in ROLES}
        return {PREFIX + role: torch.from_numpy(bits) for role, bits in packed.items()}

    def to_json(self) -> dict[str, int]:
        """Return the number of rows and of every role, for the manifest."""
        return {"rows": len(self), **self.counts}

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> FittedImages:
        """Restore what ``tensors`` and ``to_json`` gave; bits that do not fit the counts are an error."""
        try:
            n = int(about["rows"])
            bits = {role: tensors[PREFIX + role].numpy() for role in ROLES}
            record = cls(**{k: torch.from_numpy(np.unpackbits(b, count=n).astype(bool)) for k, b in bits.items()})
            whole = all(len(b) == -(-n // 8) for b in bits.values())  # unpackbits would add zeros to too few bytes
            fits = whole and record.to_json() == dict(about)
        except (KeyError, TypeError, ValueError) as error:
            raise TamperError(
                f"the artifact's record of fitted images cannot be read ({error}); attach it again."
            ) from None
        if not fits:
            raise TamperError(
                f"the artifact's record of fitted images says {dict(about)}, its bits say {record.to_json()}; attach "
                "the explainer again."
            )
        return record
