"""Sixteen lanes of 32-bit integers at a time: the two inner steps of the tree kernel, written as vector instructions.

A compiler cannot prove that a histogram and the targets do not overlap, so it would check at run time before every
sixteen additions. Spelled as one vector load, add and store there is nothing to prove.
"""

from __future__ import annotations

from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba.core import cgutils as _cgutils
from numba.core import types

cgutils: Any = _cgutils  # untyped
intrinsic: Any = numba.extending.intrinsic  # typed for the function written, not for the one it makes

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
    out: np.ndarray[Any, Any] = raw[skip : skip + size].view(dtype).reshape(shape)
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
def add_squared_gaps(typing: Any, hist: Any, at: Any, n_bins: Any, lefts: Any, mean: Any, first: Any, out: Any) -> Any:
    """Walk ``n_bins`` bins of 16 lanes from ``hist[at]``; add the squared length of each running sum's gap to ``out``.

    For bin b:  ``out[b] += |sum(hist bins 0..b) - lefts[b] * mean[first:first+16]|^2``. The sum stays in registers.
    """
    return types.void(hist, at, n_bins, lefts, mean, first, out), _walk(counting=False)


@intrinsic
def count_and_square(typing: Any, hist: Any, at: Any, n_bins: Any, lefts: Any, mean: Any, first: Any, out: Any) -> Any:
    """Do as :func:`add_squared_gaps` for the first group of lanes, whose lane 0 counts: set ``lefts`` and ``out``."""
    return types.void(hist, at, n_bins, lefts, mean, first, out), _walk(counting=True)


def _walk(counting: bool) -> Any:
    everywhere = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def array(position: int) -> Any:
            return context.make_array(signature.args[position])(context, builder, args[position]).data

        means = _load(builder, _pointer(context, builder, signature.args[4], args[4], args[5], _DOUBLES), 8)
        running = cgutils.alloca_once_value(builder, ir.Constant(_INTS, [0] * LANES))
        bins = builder.gep(array(0), [args[1]])
        lefts, out = array(3), array(6)
        stride = ir.Constant(args[2].type, LANES)
        with cgutils.for_range(builder, args[2]) as loop:
            here = builder.bitcast(builder.gep(bins, [builder.mul(loop.index, stride)]), _INTS.as_pointer())
            total = builder.add(builder.load(running), _load(builder, here, 4))
            builder.store(total, running)
            sums = builder.sitofp(total, _DOUBLES)
            left, slot = builder.gep(lefts, [loop.index]), builder.gep(out, [loop.index])
            if counting:
                builder.store(builder.extract_element(sums, ir.Constant(_I32, 0)), left)
                n_left = builder.shuffle_vector(sums, sums, everywhere)
            else:
                one = builder.insert_element(
                    ir.Constant(_DOUBLES, ir.Undefined), builder.load(left), ir.Constant(_I32, 0)
                )
                n_left = builder.shuffle_vector(one, one, everywhere)
            gap = builder.fsub(sums, builder.fmul(n_left, means))
            square = _sum(builder, builder.fmul(gap, gap))
            builder.store(square if counting else builder.fadd(builder.load(slot), square), slot)
        return context.get_dummy_value()

    return generate


@intrinsic
def rows_not_above(typing: Any, codes: Any, at: Any, n_rows: Any, row: Any, out: Any) -> Any:
    """For 16 features at once: set bit i of ``out[q]`` where ``codes[i, q] <= codes[row, q]``, i < n_rows <= 16.

    ``codes`` holds bytes, row after row of 16 features, from its flat position ``at`` on; ``out`` is 16 uint16.
    """
    short = ir.IntType(16)
    bytes_, shorts = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(short, LANES)
    everywhere = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def line(index: Any) -> Any:
            first = builder.add(args[1], builder.mul(index, ir.Constant(index.type, LANES)))
            return _load(builder, _pointer(context, builder, signature.args[0], args[0], first, bytes_), 1)

        limit = line(args[3])
        bits = cgutils.alloca_once_value(builder, ir.Constant(shorts, [0] * LANES))
        with cgutils.for_range(builder, args[2]) as loop:
            bit = builder.shl(ir.Constant(short, 1), builder.trunc(loop.index, short))
            first = builder.insert_element(ir.Constant(shorts, ir.Undefined), bit, ir.Constant(_I32, 0))
            each = builder.shuffle_vector(first, first, everywhere)
            hit = builder.icmp_unsigned("<=", line(loop.index), limit)
            new = builder.select(hit, each, ir.Constant(shorts, [0] * LANES))
            builder.store(builder.or_(builder.load(bits), new), bits)
        start = ir.Constant(args[1].type, 0)
        target = _pointer(context, builder, signature.args[4], args[4], start, shorts)
        builder.store(builder.load(bits), target).align = 2
        return context.get_dummy_value()

    return types.void(codes, at, n_rows, row, out), generate


def _sum(builder: Any, vector: Any) -> Any:
    """Fold the upper half onto the lower until one number is left: a fixed order, hence the same bits every time."""
    width = LANES
    while width > 1:
        width //= 2
        halves = [
            builder.shuffle_vector(
                vector, vector, ir.Constant(ir.VectorType(_I32, width), list(range(base, base + width)))
            )
            for base in (0, width)
        ]
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, ir.Constant(_I32, 0))
