"""Triton kernels for convolutions of many clients with few channels: blocks of output pixels count as channels.

A block of FH × FW pixels of OUT channels reads one patch of (R + FH − 1) × (S + FW − 1) pixels. Taken as one product
with OUT·FH·FW columns it fills a tensor core that OUT columns would leave idle, and every number of the patch is read
once where it would be read up to R·S times.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def folded_forward_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    x_k,
    x_b,
    x_c,
    x_h,
    x_w,
    BLOCKS: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OUT: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    FH: tl.constexpr,
    FW: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y[block m, (o, i, j)] = Σ_{c,r,s} x[c, patch of m at (r, s)]·w[(c, r, s), (o, i, j)].

    R × S is the size of the patch.
    """
    rows: tl.constexpr = OH // FH
    columns: tl.constexpr = OW // FW
    client = tl.program_id(1).to(tl.int64)
    x_ptr += client * x_k
    w_ptr += client * (C * R * S * OUT * FH * FW)
    y_ptr += client * (BLOCKS * FH * FW * OUT)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    inside = m < BLOCKS
    b, i, j = m // (rows * columns), m % (rows * columns) // columns, m % columns
    top, left = i * FH - PAD_H, j * FW - PAD_W
    patch = b * x_b + top * x_h + left * x_w
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, C * R * S, BK):
        k = start + tl.arange(0, BK)
        s, r, c = k % S, k // S % R, k // (S * R)
        real = k < C * R * S
        seen = inside[:, None] & real[None, :]
        if PAD_H > 0 or PAD_W > 0:
            h, w = top[:, None] + r[None, :], left[:, None] + s[None, :]
            seen = seen & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        a = tl.load(x_ptr + patch[:, None] + (c * x_c + r * x_h + s * x_w)[None, :], mask=seen, other=0.0)
        at = k[:, None] * (OUT * FH * FW) + n[None, :]
        v = tl.load(w_ptr + at, mask=real[:, None] & (n < OUT * FH * FW)[None, :], other=0.0)
        acc = tl.dot(a, v, acc, input_precision=PRECISION)
    place = b * (OUT * OH * OW) + i * FH * OW + j * FW
    plane = n // (FH * FW) * (OH * OW) + n // FW % FH * OW + n % FW
    out = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + place[:, None] + plane[None, :], out, mask=inside[:, None] & (n < OUT * FH * FW)[None, :])


@triton.jit
def folded_weight_kernel(
    d_ptr,
    x_ptr,
    w_ptr,
    d_k,
    d_b,
    d_o,
    d_h,
    d_w,
    x_k,
    x_b,
    x_c,
    x_h,
    x_w,
    w_k,
    w_split,
    BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OUT: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    FH: tl.constexpr,
    FW: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """dw[(o, i, j), (c, r, s)] = Σ_blocks dy[block, (o, i, j)]·x[c, patch at (r, s)].

    SPLITS programs share the blocks.
    """
    rows: tl.constexpr = OH // FH
    columns: tl.constexpr = OW // FW
    share: tl.constexpr = ((BLOCKS + SPLITS - 1) // SPLITS + BK - 1) // BK * BK
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    d_ptr += client * d_k
    x_ptr += client * x_k
    w_ptr += client * w_k + split.to(tl.int64) * w_split
    o = tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    s, r, c = n % S, n // S % R, n // (S * R)
    real = n < C * R * S
    tap = c * x_c + r * x_h + s * x_w
    out_of = o // (FH * FW) * d_o + o // FW % FH * d_h + o % FW * d_w
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(0, share // BK):
        m = split * share + step * BK + tl.arange(0, BK)
        inside = m < BLOCKS
        b, i, j = m // (rows * columns), m % (rows * columns) // columns, m % columns
        top, left = i * FH - PAD_H, j * FW - PAD_W
        g = tl.load(
            d_ptr + (b * d_b + i * FH * d_h + j * FW * d_w)[:, None] + out_of[None, :],
            mask=inside[:, None] & (o < OUT * FH * FW)[None, :],
            other=0.0,
        )
        seen = inside[:, None] & real[None, :]
        if PAD_H > 0 or PAD_W > 0:
            h, w = top[:, None] + r[None, :], left[:, None] + s[None, :]
            seen = seen & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        a = tl.load(x_ptr + (b * x_b + top * x_h + left * x_w)[:, None] + tap[None, :], mask=seen, other=0.0)
        acc = tl.dot(tl.trans(g), a, acc, input_precision=PRECISION)
    at = o[:, None] * (C * R * S) + n[None, :]
    tl.store(w_ptr + at, acc, mask=(o < OUT * FH * FW)[:, None] & real[None, :])
