"""Sixty-four positions side by side: the inner steps of the non-negative projection, written as vector instructions.

A tile is 64 neighbouring columns, four vectors of sixteen 32-bit floats. Its product with a few rows of the basis stays
in registers over many channels, and so do the sums of a coordinate pass; a compiler given the loops keeps neither.
"""

from __future__ import annotations

from typing import Any

import numba.extending
from llvmlite import ir
from numba.core import cgutils as _cgutils
from numba.core import types

cgutils: Any = _cgutils  # untyped
intrinsic: Any = numba.extending.intrinsic  # typed for the function written, not for the one it makes

WIDTH = 16
VECTORS = 4
TILE = WIDTH * VECTORS
_I1, _I32, _F32 = ir.IntType(1), ir.IntType(32), ir.FloatType()
_FLOATS = ir.VectorType(_F32, WIDTH)
_INDICES = ir.VectorType(_I32, WIDTH)
_ZERO = ir.Constant(_FLOATS, [0.0] * WIDTH)
_FUSED = ("contract",)


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_INDICES, [0] * WIDTH))


def _array(context: Any, builder: Any, signature: Any, args: Any, position: int) -> Any:
    return context.make_array(signature.args[position])(context, builder, args[position]).data


def _line(builder: Any, base: Any, index: Any, v: int) -> Any:
    """Return the pointer to vector ``v`` of the tile row that starts at ``base[index]``."""
    first = builder.add(index, ir.Constant(index.type, v * WIDTH))
    return builder.bitcast(builder.gep(base, [first]), _FLOATS.as_pointer())


def _load(builder: Any, pointer: Any) -> Any:
    value = builder.load(pointer)
    value.align = 4  # the arrays are numpy's: only the element's own alignment is certain
    return value


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, pointer).align = 4


def _masks(builder: Any, n_lanes: Any) -> list[Any]:
    """Return which lanes of the four vectors lie below ``n_lanes``."""
    limit = _splat(builder, builder.trunc(n_lanes, _I32), _INDICES)
    return [
        builder.icmp_signed("<", ir.Constant(_INDICES, list(range(v * WIDTH, (v + 1) * WIDTH))), limit)
        for v in range(VECTORS)
    ]


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _load_masked(builder: Any, pointer: Any, mask: Any) -> Any:
    arguments = [pointer, ir.Constant(_I32, 4), mask, _ZERO]
    return _call(builder, "llvm.masked.load.v16f32.p0", _FLOATS, arguments)


def _store_masked(builder: Any, value: Any, pointer: Any, mask: Any) -> None:
    _call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), [value, pointer, ir.Constant(_I32, 4), mask])


def _product(n_rows: int, is_whole: bool) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        X, W, out = (_array(context, builder, signature, args, i) for i in (0, 3, 7))
        _, x_at, x_stride, _, w_at, w_stride, n_channels, _, out_at, n_lanes = args
        masks = [] if is_whole else _masks(builder, n_lanes)
        sums = [[cgutils.alloca_once_value(builder, _ZERO) for _ in range(VECTORS)] for _ in range(n_rows)]
        with cgutils.for_range(builder, n_channels) as loop:
            row = builder.add(x_at, builder.mul(loop.index, x_stride))
            lines = [_line(builder, X, row, v) for v in range(VECTORS)]
            x = [
                _load(builder, lines[v]) if is_whole else _load_masked(builder, lines[v], masks[v])
                for v in range(VECTORS)
            ]
            weight = builder.add(w_at, builder.mul(loop.index, w_stride))
            for r in range(n_rows):
                entry = builder.gep(W, [builder.add(weight, ir.Constant(weight.type, r))])
                w = _splat(builder, builder.load(entry), _FLOATS)
                for v in range(VECTORS):
                    grown = builder.fadd(builder.load(sums[r][v]), builder.fmul(w, x[v], flags=_FUSED), flags=_FUSED)
                    builder.store(grown, sums[r][v])
        for r in range(n_rows):
            at = builder.add(out_at, ir.Constant(out_at.type, r * TILE))
            for v in range(VECTORS):
                line = _line(builder, out, at, v)
                _store(builder, builder.fadd(_load(builder, line), builder.load(sums[r][v])), line)
        return context.get_dummy_value()

    return generate


@intrinsic
def add_product_of_four(
    typing: Any,
    X: Any,
    at: Any,
    stride: Any,
    W: Any,
    w_at: Any,
    w_stride: Any,
    n: Any,
    out: Any,
    out_at: Any,
    lanes: Any,
) -> Any:
    """Add sum_c W[w_at + c w_stride + r] X[at + c stride + p] to ``out[out_at + 64 r + p]``, r < 4, p < 64, c < n."""
    return types.void(X, at, stride, W, w_at, w_stride, n, out, out_at, lanes), _product(4, is_whole=True)


@intrinsic
def add_product_of_two(
    typing: Any,
    X: Any,
    at: Any,
    stride: Any,
    W: Any,
    w_at: Any,
    w_stride: Any,
    n: Any,
    out: Any,
    out_at: Any,
    lanes: Any,
) -> Any:
    """Do as :func:`add_product_of_four` for two rows."""
    return types.void(X, at, stride, W, w_at, w_stride, n, out, out_at, lanes), _product(2, is_whole=True)


@intrinsic
def add_product_of_two_short(
    typing: Any,
    X: Any,
    at: Any,
    stride: Any,
    W: Any,
    w_at: Any,
    w_stride: Any,
    n: Any,
    out: Any,
    out_at: Any,
    lanes: Any,
) -> Any:
    """Do as :func:`add_product_of_two` where only the first ``lanes`` columns are there; the others count as zero."""
    return types.void(X, at, stride, W, w_at, w_stride, n, out, out_at, lanes), _product(2, is_whole=False)


@intrinsic
def add_product_of_four_short(
    typing: Any,
    X: Any,
    at: Any,
    stride: Any,
    W: Any,
    w_at: Any,
    w_stride: Any,
    n: Any,
    out: Any,
    out_at: Any,
    lanes: Any,
) -> Any:
    """Do as :func:`add_product_of_four` where only the first ``lanes`` columns are there; the others count as zero."""
    return types.void(X, at, stride, W, w_at, w_stride, n, out, out_at, lanes), _product(4, is_whole=False)


def _pass(watching: bool) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        s, b, H = (_array(context, builder, signature, args, i) for i in (0, 1, 2))
        rank, stride = args[3], args[4]
        tile = ir.Constant(rank.type, TILE)
        sums = [cgutils.alloca_once_value(builder, _ZERO) for _ in range(VECTORS)]
        moved = [cgutils.alloca_once_value(builder, _ZERO) for _ in range(VECTORS)]
        top = [cgutils.alloca_once_value(builder, _ZERO) for _ in range(VECTORS)]
        with cgutils.for_range(builder, rank) as rows:
            row = builder.mul(rows.index, tile)
            for v in range(VECTORS):
                builder.store(_load(builder, _line(builder, b, row, v)), sums[v])
            first = builder.mul(rows.index, stride)
            with cgutils.for_range(builder, rank) as others:
                h = builder.load(builder.gep(H, [builder.add(first, others.index)]))
                each, row_start = _splat(builder, h, _FLOATS), builder.mul(others.index, tile)
                for v in range(VECTORS):
                    pull = builder.fmul(each, _load(builder, _line(builder, s, row_start, v)), flags=_FUSED)
                    builder.store(builder.fsub(builder.load(sums[v]), pull, flags=_FUSED), sums[v])
            for v in range(VECTORS):
                line, value = _line(builder, s, row, v), builder.load(sums[v])
                # A NaN is not below zero, so it stays and is noticed by the test whether the lane has settled.
                new = builder.select(builder.fcmp_ordered("<", value, _ZERO), _ZERO, value)
                if watching:
                    step = builder.fsub(new, _load(builder, line))
                    size = _call(builder, "llvm.fabs.v16f32", _FLOATS, [step])
                    builder.store(builder.fadd(builder.load(moved[v]), size), moved[v])
                    above = builder.load(top[v])
                    builder.store(builder.select(builder.fcmp_ordered("<", above, new), new, above), top[v])
                _store(builder, new, line)
        if watching:
            zero = ir.Constant(rank.type, 0)
            for position, vectors in ((5, moved), (6, top)):
                base = _array(context, builder, signature, args, position)
                for v in range(VECTORS):
                    _store(builder, builder.load(vectors[v]), _line(builder, base, zero, v))
        return context.get_dummy_value()

    return generate


@intrinsic
def coordinate_pass(typing: Any, s: Any, b: Any, H: Any, rank: Any, stride: Any) -> Any:
    """Set ``s_k = max(0, b_k - sum_j H[k, j] s_j)`` for k = 0, 1, ... in all 64 lanes; H has a zero diagonal."""
    return types.void(s, b, H, rank, stride), _pass(watching=False)


@intrinsic
def watched_pass(typing: Any, s: Any, b: Any, H: Any, rank: Any, stride: Any, moved: Any, top: Any) -> Any:
    """Do as :func:`coordinate_pass`; set per lane ``moved`` = sum_k |step_k| and ``top`` = max_k s_k."""
    return types.void(s, b, H, rank, stride, moved, top), _pass(watching=True)


@intrinsic
def write_row(typing: Any, S: Any, at: Any, s: Any, s_at: Any, scale: Any, lanes: Any) -> Any:
    """Set ``S[at + p] = scale * s[s_at + p]`` for p below ``lanes``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        S, s = (_array(context, builder, signature, args, i) for i in (0, 2))
        each, masks = _splat(builder, args[4], _FLOATS), _masks(builder, args[5])
        for v in range(VECTORS):
            value = builder.fmul(each, _load(builder, _line(builder, s, args[3], v)))
            _store_masked(builder, value, _line(builder, S, args[1], v), masks[v])
        return context.get_dummy_value()

    return types.void(S, at, s, s_at, scale, lanes), generate
