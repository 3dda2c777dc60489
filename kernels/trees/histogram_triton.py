"""The histogram step of the tree kernel on a GPU, in Triton.

One program owns one feature, one group of lanes and a share of the node's rows; it sums one-hot codes times targets in
registers and adds the result to the histogram once. The targets are the fixed-point integers of `split_search`, so the
order in which programs finish leaves no trace. ``TRITON_INTERPRET=1`` runs it without a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _histogram(  # type: ignore[no-untyped-def]
    codes,
    rows,
    targets,
    out,
    n_rows,
    n_features,
    n_lanes,
    rows_each,
    CODES: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    feature, group, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    code = tl.arange(0, CODES)
    lane = group * LANES + tl.arange(0, LANES)
    total = tl.zeros((CODES, LANES), dtype=tl.int32)
    for first in range(share * rows_each, (share + 1) * rows_each, ROWS):
        index = first + tl.arange(0, ROWS)
        here = index < tl.minimum(n_rows, (share + 1) * rows_each)
        row = tl.load(rows + index, mask=here, other=0).to(tl.int64)
        row_code = tl.load(codes + row * n_features + feature, mask=here, other=0).to(tl.int32)
        y = tl.load(
            targets + row[:, None] * n_lanes + lane[None, :], mask=here[:, None] & (lane < n_lanes)[None, :], other=0
        )
        hit = (row_code[:, None] == code[None, :]) & here[:, None]
        total += tl.sum(tl.where(hit[:, :, None], y[:, None, :], 0), axis=0)
    slot = (feature * CODES + code[:, None]) * n_lanes + lane[None, :]
    tl.atomic_add(out + slot, total, mask=(lane < n_lanes)[None, :])


def node_histograms(codes: Tensor, rows: Tensor, targets: Tensor, n_codes: int, n_shares: int = 4) -> Tensor:
    """Return the (features, n_codes, lanes) int32 sums of ``targets`` (all rows, lanes; int32) over each code value.

    ``codes`` is (all rows, features) uint8, ``rows`` the node's rows (int32), ``n_codes`` a power of two.
    """
    n_features, n_lanes, n_rows = codes.shape[1], targets.shape[1], len(rows)
    out = torch.zeros(n_features, n_codes, n_lanes, dtype=torch.int32, device=codes.device)
    block, lanes = 32, 16
    each = -(-max(n_rows, 1) // (n_shares * block)) * block
    _histogram[(n_features, -(-n_lanes // lanes), n_shares)](
        codes.contiguous(),
        rows.contiguous(),
        targets.contiguous(),
        out,
        n_rows,
        n_features,
        n_lanes,
        each,
        CODES=n_codes,
        LANES=lanes,
        ROWS=block,
    )
    return out


def node_histograms_reference(codes: Tensor, rows: Tensor, targets: Tensor, n_codes: int) -> Tensor:
    """Add up row by row."""
    out = torch.zeros(codes.shape[1], n_codes, targets.shape[1], dtype=torch.int32)
    for row in rows.tolist():
        for feature in range(codes.shape[1]):
            out[feature, int(codes[row, feature])] += targets[row]
    return out
