"""Triton kernels for convolutions of many clients, each with its own weights: implicit matrix products, no im2col copy.

The grid has an axis of clients. What is read comes with its strides; channels side by side is the fast layout, and how
maps are written: ``_k`` is the stride from client to client, ``_m`` from pixel to pixel.
Importing this module needs Triton, which comes with PyTorch for CUDA.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    x_k,
    x_b,
    x_c,
    x_h,
    x_w,
    w_k,
    w_o,
    w_c,
    w_r,
    w_s,
    y_k,
    y_m,
    PIXELS: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OUT: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    FLAT: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """y[m, o] = Σ_{r,s,c} x[pixel m shifted by (r, s), c]·w[o, c, r, s]; a program makes BM pixels × BN channels."""
    tiles_n: tl.constexpr = (OUT + BN - 1) // BN
    pid = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    x_ptr += client * x_k
    w_ptr += client * w_k
    y_ptr += client * y_k
    m = pid // tiles_n * BM + tl.arange(0, BM)
    n = pid % tiles_n * BN + tl.arange(0, BN)
    top = m % (OH * OW) // OW * STRIDE - PAD_H
    left = m % OW * STRIDE - PAD_W
    x_ptr += m // (OH * OW) * x_b + top * x_h + left * x_w
    inside = m < PIXELS
    acc = tl.zeros((BM, BN), tl.float32)
    if FLAT:
        for start in range(0, R * S * C, BK):
            k = start + tl.arange(0, BK)
            c, s, r = k % C, k // C % S, k // (C * S)
            real = k < R * S * C
            seen = inside[:, None] & real[None, :]
            if PAD_H > 0 or PAD_W > 0:
                h, w = top[:, None] + r[None, :], left[:, None] + s[None, :]
                seen = seen & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            a = tl.load(x_ptr[:, None] + (r * x_h + s * x_w + c * x_c)[None, :], mask=seen, other=0.0)
            at = (r * w_r + s * w_s + c * w_c)[:, None] + n[None, :] * w_o
            b = tl.load(w_ptr + at, mask=real[:, None] & (n < OUT)[None, :], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        blocks: tl.constexpr = C // BK
        for step in range(0, R * S * blocks):
            tap = step // blocks
            c = step % blocks * BK + tl.arange(0, BK)
            r, s = tap // S, tap % S
            h, w = top + r, left + s
            seen = inside & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            a = tl.load((x_ptr + r * x_h + s * x_w)[:, None] + (c * x_c)[None, :], mask=seen[:, None], other=0.0)
            at = r * w_r + s * w_s + (c * w_c)[:, None] + n[None, :] * w_o
            b = tl.load(w_ptr + at, mask=(n < OUT)[None, :], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    out = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + m[:, None] * y_m + n[None, :], out, mask=inside[:, None] & (n < OUT)[None, :])


@triton.jit
def input_kernel(
    d_ptr,
    w_ptr,
    x_ptr,
    d_k,
    d_b,
    d_o,
    d_h,
    d_w,
    w_k,
    w_o,
    w_c,
    w_r,
    w_s,
    x_k,
    x_m,
    BATCH: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OUT: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    FLAT: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """dx[pixel, c] = Σ_{r,s,o} dy[the output pixels that saw it through (r, s), o]·w[o, c, r, s].

    With stride t a pixel (h, w) is seen through the taps r ≡ h + pad (mod t) only: each of the t² residues is a phase
    of its own, with its own taps.
    """
    tiles_n: tl.constexpr = (C + BN - 1) // BN
    rows: tl.constexpr = (H + STRIDE - 1) // STRIDE
    columns: tl.constexpr = (W + STRIDE - 1) // STRIDE
    pid = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    phase_h, phase_w = tl.program_id(2) // STRIDE, tl.program_id(2) % STRIDE
    d_ptr += client * d_k
    w_ptr += client * w_k
    x_ptr += client * x_k
    m = pid // tiles_n * BM + tl.arange(0, BM)
    n = pid % tiles_n * BN + tl.arange(0, BN)
    example = m // (rows * columns)
    i, j = m % (rows * columns) // columns, m % columns
    h, w = i * STRIDE + phase_h, j * STRIDE + phase_w
    inside = (example < BATCH) & (h < H) & (w < W)
    first_r, first_s = (phase_h + PAD_H) % STRIDE, (phase_w + PAD_W) % STRIDE
    low, near = (phase_h + PAD_H) // STRIDE + i, (phase_w + PAD_W) // STRIDE + j
    if STRIDE == 1:
        taps_r: tl.constexpr = R
        taps_s: tl.constexpr = S
    else:
        taps_r = (R - first_r + STRIDE - 1) // STRIDE
        taps_s = (S - first_s + STRIDE - 1) // STRIDE
    d_ptr += example * d_b + low * d_h + near * d_w
    acc = tl.zeros((BM, BN), tl.float32)
    if FLAT:
        for start in range(0, taps_r * taps_s * OUT, BK):
            k = start + tl.arange(0, BK)
            o, v, u = k % OUT, k // OUT % taps_s, k // (OUT * taps_s)
            real = k < taps_r * taps_s * OUT
            oh, ow = low[:, None] - u[None, :], near[:, None] - v[None, :]
            seen = inside[:, None] & real[None, :] & (oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW)
            a = tl.load(d_ptr[:, None] + (o * d_o - u * d_h - v * d_w)[None, :], mask=seen, other=0.0)
            r, s = first_r + u * STRIDE, first_s + v * STRIDE
            at = (r * w_r + s * w_s + o * w_o)[:, None] + n[None, :] * w_c
            b = tl.load(w_ptr + at, mask=real[:, None] & (n < C)[None, :], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        blocks: tl.constexpr = OUT // BK
        for step in range(0, taps_r * taps_s * blocks):
            tap = step // blocks
            o = step % blocks * BK + tl.arange(0, BK)
            u, v = tap // taps_s, tap % taps_s
            oh, ow = low - u, near - v
            seen = inside & (oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW)
            a = tl.load((d_ptr - u * d_h - v * d_w)[:, None] + (o * d_o)[None, :], mask=seen[:, None], other=0.0)
            r, s = first_r + u * STRIDE, first_s + v * STRIDE
            at = r * w_r + s * w_s + (o * w_o)[:, None] + n[None, :] * w_c
            b = tl.load(w_ptr + at, mask=(n < C)[None, :], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    at = ((example * (H * W) + h * W + w) * x_m)[:, None] + n[None, :]
    tl.store(x_ptr + at, acc.to(x_ptr.dtype.element_ty), mask=inside[:, None] & (n < C)[None, :])


@triton.jit
def weight_kernel(
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
    PIXELS: tl.constexpr,
    SPLITS: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    OUT: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """dw[o, (r, s, c)] = Σ_m dy[m, o]·x[pixel m shifted by (r, s), c]; the pixels are divided over SPLITS programs."""
    tiles_n: tl.constexpr = (R * S * C + BN - 1) // BN
    share: tl.constexpr = ((PIXELS + SPLITS - 1) // SPLITS + BK - 1) // BK * BK
    pid = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    d_ptr += client * d_k
    x_ptr += client * x_k
    w_ptr += client * w_k + split.to(tl.int64) * w_split
    o = pid // tiles_n * BM + tl.arange(0, BM)
    n = pid % tiles_n * BN + tl.arange(0, BN)
    real = n < R * S * C
    if C % BN == 0:  # one tap for the whole tile: the mask is one of pixels
        start = pid % tiles_n * BN
        s, r = start // C % S, start // (C * S)
    else:
        s, r = n // C % S, n // (C * S)
    tap = r * x_h + s * x_w + n % C * x_c  # of n, which the compiler knows to run on: else it reads number by number
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(0, share // BK):
        m = split * share + step * BK + tl.arange(0, BK)
        inside = m < PIXELS
        b, oh, ow = m // (OH * OW), m % (OH * OW) // OW, m % OW
        top, left = oh * STRIDE - PAD_H, ow * STRIDE - PAD_W
        g = tl.load(
            d_ptr + (b * d_b + oh * d_h + ow * d_w)[:, None] + (o * d_o)[None, :],
            mask=inside[:, None] & (o < OUT)[None, :],
            other=0.0,
        )
        if C % BN == 0:
            h, w = top + r, left + s
            seen = (inside & (h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None]
        else:
            seen = inside[:, None] & real[None, :]
            if PAD_H > 0 or PAD_W > 0:
                h, w = top[:, None] + r[None, :], left[:, None] + s[None, :]
                seen = seen & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        a = tl.load(x_ptr + (b * x_b + top * x_h + left * x_w)[:, None] + tap[None, :], mask=seen, other=0.0)
        acc = tl.dot(tl.trans(g), a, acc, input_precision=PRECISION)
    out = acc.to(w_ptr.dtype.element_ty)
    tl.store(w_ptr + o[:, None] * (R * S * C) + n[None, :], out, mask=(o < OUT)[:, None] & real[None, :])
