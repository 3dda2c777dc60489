"""Sixteen lanes of 32-bit integers at a time: the two inner steps of the tree kernel, written as vector instructions.

A compiler cannot prove that a histogram and the targets do not overlap, so it would check at run time before every
sixteen additions. Spelled as one vector load, add and store there is nothing to prove.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

LANES = 16
CACHE_LINE = 64
_I32 = ir.IntType(32)
_F64 = ir.DoubleType()
_INTS = ir.VectorType(_I32, LANES)
_DOUBLES = ir.VectorType(_F64, LANES)


def aligned(shape: int | tuple[int, ...], dtype: Any, fill: int | None = 0) -> np.ndarray[Any, Any]:
    """Return an array that starts on a cache line, so that no group of sixteen lanes lies across two of them."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + CACHE_LINE, dtype=np.uint8)
    skip = -raw.ctypes.data % CACHE_LINE
    out = raw[skip : skip + size].view(dtype).reshape(shape)
    if fill is not None:
        out[...] = fill
    return out


def _pointer(context: Any, builder: Any, array_type: Any, value: Any, index: Any, vector: Any) -> Any:
    data = context.make_array(array_type)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _load(builder: Any, pointer: Any, align: int) -> Any:
    value = builder.load(pointer)
    value.align = align  # the arrays are numpy's: only the element's own alignment is certain
    return value


@intrinsic
def add_lanes(typing: Any, total: Any, at: Any, part: Any, of: Any) -> Any:
    """``total[at:at+16] += part[of:of+16]`` for flat int32 arrays."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        here = _pointer(context, builder, signature.args[0], args[0], args[1], _INTS)
        there = _pointer(context, builder, signature.args[2], args[2], args[3], _INTS)
        grown = builder.add(_load(builder, here, 4), _load(builder, there, 4))
        builder.store(grown, here).align = 4
        return context.get_dummy_value()

    return types.void(total, at, part, of), generate


@intrinsic
def advance_and_square(
    typing: Any, hist: Any, at: Any, run: Any, start: Any, mean: Any, first: Any, n_left: Any
) -> Any:
    """``run[start:start+16] += hist[at:at+16]``, then return the squared length of ``run - n_left * mean``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bins = _pointer(context, builder, signature.args[0], args[0], args[1], _INTS)
        running = _pointer(context, builder, signature.args[2], args[2], args[3], _INTS)
        means = _pointer(context, builder, signature.args[4], args[4], args[5], _DOUBLES)
        total = builder.add(_load(builder, running, 4), _load(builder, bins, 4))
        builder.store(total, running).align = 4
        count = ir.Constant(_DOUBLES, ir.Undefined)
        for lane in range(LANES):
            count = builder.insert_element(count, args[6], ir.Constant(_I32, lane))
        gap = builder.fsub(builder.sitofp(total, _DOUBLES), builder.fmul(count, _load(builder, means, 8)))
        square = builder.fmul(gap, gap)
        width = LANES
        while width > 1:  # fold the upper half onto the lower: a fixed order, hence the same bits every time
            width //= 2
            undefined = ir.Constant(square.type, ir.Undefined)
            low, high = (
                builder.shuffle_vector(
                    square, undefined, ir.Constant(ir.VectorType(_I32, width), list(range(base, base + width)))
                )
                for base in (0, width)
            )
            square = builder.fadd(low, high)
        return builder.extract_element(square, ir.Constant(_I32, 0))

    return types.float64(hist, at, run, start, mean, first, n_left), generate
