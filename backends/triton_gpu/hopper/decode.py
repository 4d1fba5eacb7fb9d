"""C = activation(A @ W + bias) for few rows: weights stream from memory straight into mma operands.

One program owns ``STRIPS * 16`` columns and the whole of K. Its warps share out K tile by tile: no weight is read
twice, no warp waits for another while K lasts, and one sum through shared memory at the end, in a fixed order, joins
them; partial sums never go through global memory. Each warp keeps DEPTH tiles in registers: one in work, the others
on their way.

Operands: words int16 ``[N/64, K/block, 4, 32, 8]``, scales and zeros ``[G, ceil64(N)]`` (hopper/layout.py);
a ``[M, K]``, K contiguous; c ``[M, N]`` any strides; bias ``[N]`` or None.

The weight is the 16-row operand of ``mma.m16n8k16`` and A the 8-column one. For a group ``W = s (q - mid) + o``, with
``o = s (mid - z)`` or ``o = b + s mid``: the sum over the group of ``a (q - mid)`` is scaled in float32, and the
group's sum of ``a``, from a product with ones, takes ``o``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qmm.backends.triton_gpu.hopper.compat import barrier
from qmm.backends.triton_gpu.hopper.dequantise import centred
from qmm.backends.triton_gpu.hopper.epilogue import activated
from qmm.backends.triton_gpu.hopper.mma_operands import (
    activation_operand,
    by_column,
    group_layout,
    halves,
    operand,
    over_strips,
    pair_layout,
)


@gluon.jit
def load_activations(
    a_ptrs, tile, pair, rows, first, tiles_k, K, BLOCK: gl.constexpr, PARTS: gl.constexpr, K_TAIL: gl.constexpr
):
    """A for B tiles from tile ``first`` on, words ``[B, BLOCK / PARTS / 2, BM]`` a part; zeros outside."""
    if PARTS == 1:
        return (load_part(a_ptrs, tile, pair, rows, first, tiles_k, K, BLOCK, 0, K_TAIL),)
    else:
        return (
            load_part(a_ptrs, tile, pair, rows, first, tiles_k, K, BLOCK, 0, K_TAIL),
            load_part(a_ptrs, tile, pair, rows, first, tiles_k, K, BLOCK, BLOCK // 2, K_TAIL),
        )


@gluon.jit
def load_part(
    a_ptrs, tile, pair, rows, first, tiles_k, K, BLOCK: gl.constexpr, START: gl.constexpr, K_TAIL: gl.constexpr
):
    """Words of two neighbours; K is even."""
    if K_TAIL:
        inside = rows & ((first + tile) * BLOCK + START + pair * 2 < K)
    else:
        inside = rows & (first + tile < tiles_k) & (pair >= 0)
    return gl.load(a_ptrs + (first * BLOCK + START) // 2, mask=inside, other=0)


@gluon.jit
def load_group(
    ptrs, tile, tiles_k, row_words, K, part: gl.constexpr,
    BLOCK: gl.constexpr, TILES_PER_GROUP: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Scales (or zeros) of part ``part`` of each warp's tile; 0 outside."""
    if TILES_PER_GROUP == 0:
        group = tile * 0
    else:
        group = tile // TILES_PER_GROUP * PARTS + part
    inside = (tile < tiles_k) & (group * (BLOCK // PARTS) * TILES_PER_GROUP < K)
    return gl.load(ptrs + group.to(gl.int64) * row_words, mask=inside, other=0)


@gluon.jit
def load_groups(
    ptrs, tile, tiles_k, row_words, K, BLOCK: gl.constexpr, TILES_PER_GROUP: gl.constexpr, PARTS: gl.constexpr
):
    """The scales (or zeros) of every part."""
    if PARTS == 1:
        return (load_group(ptrs, tile, tiles_k, row_words, K, 0, BLOCK, TILES_PER_GROUP, PARTS),)
    else:
        return (
            load_group(ptrs, tile, tiles_k, row_words, K, 0, BLOCK, TILES_PER_GROUP, PARTS),
            load_group(ptrs, tile, tiles_k, row_words, K, 1, BLOCK, TILES_PER_GROUP, PARTS),
        )


@gluon.jit
def stay():
    """Loads above stay above: ptxas would issue them just before their use, to save registers.

    It moves nothing over a branch whose outcome it cannot know; program_id(2) is 0, so that this one never repeats.
    """
    zero = gl.full([32 * gl.num_warps()], 0, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.inline_asm_elementwise(
        "{ .reg .pred p; again: bar.warp.sync 0xffffffff; setp.ne.s32 p, $1, 0; @p bra again; mov.b32 $0, $1; }",
        "=r,r", [zero + gl.program_id(2)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_weights(first, weights, tiles_k):
    """The weights of a step."""
    w_ptrs, wb = weights
    first = gl.to_tensor(first)
    return gl.load(
        w_ptrs + first.to(gl.int64) * 512, mask=first + wb < tiles_k, other=0, eviction_policy="evict_first"
    )


@gluon.jit
def load_rest(
    w, first, rest, tiles_k, B: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr, S_WIDTH: gl.constexpr,
    Z_WIDTH: gl.constexpr, TILES_PER_GROUP: gl.constexpr, PARTS: gl.constexpr, K_TAIL: gl.constexpr,
):  # fmt: skip
    """What a step needs beside its weights ``w``."""
    BLOCK: gl.constexpr = 256 // BITS
    a_ptrs, ab, a_pair, rows, s_ptrs, s_tile, z_ptrs, z_tile, padded_n, K = rest
    first = gl.to_tensor(first)
    a = load_activations(a_ptrs, ab, a_pair, rows, first, tiles_k, K, BLOCK, PARTS, K_TAIL)
    s = load_groups(s_ptrs, first + s_tile, tiles_k, padded_n * S_WIDTH // 2, K, BLOCK, TILES_PER_GROUP, PARTS)
    if ZERO == "none":
        return w, a, s, s
    else:
        z = load_groups(z_ptrs, first + z_tile, tiles_k, padded_n * Z_WIDTH // 2, K, BLOCK, TILES_PER_GROUP, PARTS)
        return w, a, s, z


@gluon.jit
def load_step(
    first, weights, rest, tiles_k, B: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr, S_WIDTH: gl.constexpr,
    Z_WIDTH: gl.constexpr, TILES_PER_GROUP: gl.constexpr, PARTS: gl.constexpr, K_TAIL: gl.constexpr,
):  # fmt: skip
    """Weights, activations, scales and zeros of the B tiles of K from tile ``first`` on, one tile a warp."""
    w = load_weights(first, weights, tiles_k)
    return load_rest(w, first, rest, tiles_k, B, BITS, ZERO, S_WIDTH, Z_WIDTH, TILES_PER_GROUP, PARTS, K_TAIL)


@gluon.jit
def multiply(
    x, acc, first, K, B: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr, PARTS: gl.constexpr,
    STRIPS: gl.constexpr, BM: gl.constexpr, dtype: gl.constexpr, s_type: gl.constexpr, z_type: gl.constexpr,
    K_TAIL: gl.constexpr,
):  # fmt: skip
    """``acc += s (A (q - mid)) + o sum(A)`` for what :func:`load_step` brought."""
    mma: gl.constexpr = acc.type.layout
    dot_w: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    dot_a: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    row: gl.constexpr = gl.SliceLayout(2, mma)
    PRODUCTS: gl.constexpr = 16 // BITS // PARTS
    PART: gl.constexpr = 256 // BITS // PARTS
    MID: gl.constexpr = 1 << (BITS - 1)
    w, a, s, z = x
    low, high = halves(w, gl.int16)
    codes = centred(gl.reshape(gl.join(low, high), (B, STRIPS * 32, 8)), BITS, dtype)
    for part in gl.static_range(PARTS):
        a_part = activation_operand(a[part], dtype, dot_a)
        partial = gl.zeros([B, STRIPS * 16, BM], gl.float32, mma)
        partial = mma_v2(operand(codes, part, B, STRIPS, PRODUCTS, dot_w), a_part, partial)
        scale = by_column(s[part], B, STRIPS, s_type, row)
        acc = acc + partial * gl.expand_dims(scale, 2)
        if ZERO != "none":
            ones = gl.full([B, 16, PART], 1.0, dtype, dot_w)
            if K_TAIL:  # padded rows of K must not count
                tile = gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(2, dot_w)))[:, None, None] + first
                k = gl.arange(0, PART, gl.SliceLayout(0, gl.SliceLayout(1, dot_w)))[None, None, :]
                inside = tile * PARTS * PART + part * PART + k < K
                ones = gl.where(inside, ones, 0.0)
            a_sum = mma_v2(ones, a_part, gl.zeros([B, 16, BM], gl.float32, mma))
            zero = by_column(z[part], B, STRIPS, z_type, row)
            if ZERO == "bias":
                offset = zero + scale * MID
            else:
                offset = scale * (MID - zero)
            acc = acc + over_strips(a_sum, STRIPS, mma) * gl.expand_dims(offset, 2)
    return acc


@gluon.jit
def group_offsets(tile_n, strip0, B: gl.constexpr, STRIPS: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Word offsets ``[B, g, (strip, r8)]`` of a tile's values in one row of them, and the tile each belongs to."""
    b = gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    v = gl.arange(0, STRIPS * WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return (tile_n * 32 + strip0 + g * 4) * WIDTH + v + b * 0, b


@gluon.jit
def finish(acc, pid_n, pid_m, bias_ptr, c_ptr, M, N, c_stride_m, c_stride_n, ACTIVATION: gl.constexpr):
    """Join the warps, ``[B, BN, BM]`` through shared memory summed in the order of B, and store C."""
    B: gl.constexpr = acc.shape[0]
    BN: gl.constexpr = acc.shape[1]
    BM: gl.constexpr = acc.shape[2]
    joined: gl.constexpr = gl.BlockedLayout([B, 1, 1], [1, 8, 4], [1, gl.num_warps(), 1], [1, 2, 0])
    shared = gl.allocate_shared_memory(gl.float32, [B, BN, BM], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    shared.store(acc)
    barrier()
    total = gl.sum(shared.load(joined), axis=0)
    out_layout: gl.constexpr = gl.SliceLayout(0, joined)
    n = pid_n * BN + gl.arange(0, BN, gl.SliceLayout(1, out_layout))
    m = pid_m * BM + gl.arange(0, BM, gl.SliceLayout(0, out_layout))
    if bias_ptr is not None:
        total = total + gl.expand_dims(gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32), 1)
    total = activated(total, ACTIVATION).to(c_ptr.dtype.element_ty)
    c_at = n[:, None].to(gl.int64) * c_stride_n + m[None, :].to(gl.int64) * c_stride_m
    gl.store(c_ptr + c_at, total, mask=(n[:, None] < N) & (m[None, :] < M))


@gluon.jit(do_not_specialize=["M", "a_stride_m8", "c_stride_m", "c_stride_n"])
def decode_kernel(
    a_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, c_ptr, M, N, K, a_stride_m8, c_stride_m, c_stride_n,
    BITS: gl.constexpr, ZERO: gl.constexpr, TILES_PER_GROUP: gl.constexpr, PARTS: gl.constexpr,
    ACTIVATION: gl.constexpr, STRIPS: gl.constexpr, BM: gl.constexpr, DEPTH: gl.constexpr, K_TAIL: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Tile ``program_id`` of C: columns first, then rows.

    B tiles of K, one a warp, are one step. A group is TILES_PER_GROUP tiles (0: all of K), or a tile has PARTS groups.
    What lies outside loads as zeros; in a padded tile the codes are MID besides. K_TAIL: K is no multiple of the tile.
    DEPENDENT: launched while the kernel before may still run; it loads weights first, and then waits for it.
    """
    B: gl.constexpr = gl.num_warps()
    BN: gl.constexpr = STRIPS * 16
    BLOCK: gl.constexpr = 256 // BITS
    dtype: gl.constexpr = a_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[B, 1, 1], instr_shape=[1, 16, 8])
    PART: gl.constexpr = BLOCK // PARTS
    flat: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [B, 1, 1], [2, 1, 0])
    pairs: gl.constexpr = pair_layout(B, PART // 2, BM)

    tiles_n = gl.cdiv(N, BN)
    pid_n = gl.program_id(0) % tiles_n
    pid_m = gl.program_id(0) // tiles_n
    tiles_k = gl.cdiv(K, BLOCK)
    padded_n = gl.cdiv(N, 64) * 64
    strip0 = pid_n % (4 // STRIPS) * STRIPS
    tile_n = pid_n * STRIPS // 4

    # weights: tile b of K at w_base + b * 512 words
    wb = gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(2, flat)))[:, None, None]
    w_lane = gl.arange(0, STRIPS * 32, gl.SliceLayout(0, gl.SliceLayout(2, flat)))[None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, flat)))[None, None, :]
    w_base = w_ptr.to(gl.pointer_type(gl.int32)) + tile_n.to(gl.int64) * tiles_k * 512 + strip0 * 128
    w_ptrs = w_base + (wb * 512 + w_lane * 4 + word)

    # activations: B tiles of BLOCK by BM rows, in pairs
    ab = gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(2, pairs)))[:, None, None]
    a_pair = gl.arange(0, PART // 2, gl.SliceLayout(0, gl.SliceLayout(2, pairs)))[None, :, None]
    am = pid_m * BM + gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(1, pairs)))[None, None, :]
    a_ptrs = a_ptr.to(gl.pointer_type(gl.int32)) + am.to(gl.int64) * a_stride_m8 * 4 + (ab * (BLOCK // 2) + a_pair)
    rows = am < M

    # scales and zeros: column n of a tile stands at g * 8 + strip * 2 + r8
    s_type: gl.constexpr = s_ptr.dtype.element_ty
    S_WIDTH: gl.constexpr = s_type.primitive_bitwidth // 16  # words of a pair
    s_held: gl.constexpr = group_layout(B, STRIPS * S_WIDTH)
    s_at, s_tile = group_offsets(tile_n, strip0, B, STRIPS, S_WIDTH, s_held)
    s_ptrs = s_ptr.to(gl.pointer_type(gl.int32)) + s_at
    z_type: gl.constexpr = s_type if ZERO == "none" else z_ptr.dtype.element_ty
    Z_WIDTH: gl.constexpr = z_type.primitive_bitwidth // 16
    z_held: gl.constexpr = group_layout(B, STRIPS * Z_WIDTH)
    z_at, z_tile = group_offsets(tile_n, strip0, B, STRIPS, Z_WIDTH, z_held)
    z_ptrs = s_ptrs
    if ZERO != "none":
        z_ptrs = z_ptr.to(gl.pointer_type(gl.int32)) + z_at

    acc = gl.zeros([B, BN, BM], gl.float32, mma)
    weights = (w_ptrs, wb)
    rest = (a_ptrs, ab, a_pair, rows, s_ptrs, s_tile, z_ptrs, z_tile, padded_n, K)
    w0 = load_weights(0, weights, tiles_k)
    w1 = load_weights(B, weights, tiles_k) if DEPTH > 1 else w0
    if DEPENDENT:  # everything but the weights may be what the kernel before this one writes
        gdc_launch_dependents()
        gdc_wait()
    x0 = load_rest(w0, 0, rest, tiles_k, B, BITS, ZERO, S_WIDTH, Z_WIDTH, TILES_PER_GROUP, PARTS, K_TAIL)
    if DEPTH > 1:
        x1 = load_rest(w1, B, rest, tiles_k, B, BITS, ZERO, S_WIDTH, Z_WIDTH, TILES_PER_GROUP, PARTS, K_TAIL)
    if DEPTH > 2:
        x2 = load_step(2 * B, weights, rest, tiles_k, B, BITS, ZERO, S_WIDTH, Z_WIDTH, TILES_PER_GROUP, PARTS, K_TAIL)
    if DEPTH > 3:
        x3 = load_step(3 * B, weights, rest, tiles_k, B, BITS, ZERO, S_WIDTH, Z_WIDTH, TILES_PER_GROUP, PARTS, K_TAIL)
    for first in range(0, tiles_k, DEPTH * B):
        ahead = first + DEPTH * B
        acc = multiply(x0, acc, first, K, B, BITS, ZERO, PARTS, STRIPS, BM, dtype, s_type, z_type, K_TAIL)
        x0 = load_step(
            ahead, weights, rest, tiles_k, B, BITS, ZERO, S_WIDTH, Z_WIDTH, TILES_PER_GROUP, PARTS, K_TAIL
        )
        if DEPTH > 1:
            stay()
            acc = multiply(x1, acc, first + B, K, B, BITS, ZERO, PARTS, STRIPS, BM, dtype, s_type, z_type, K_TAIL)
            x1 = load_step(
                ahead + B, weights, rest, tiles_k, B, BITS, ZERO, S_WIDTH, Z_WIDTH, TILES_PER_GROUP, PARTS, K_TAIL
            )
        if DEPTH > 2:
            stay()
            acc = multiply(x2, acc, first + 2 * B, K, B, BITS, ZERO, PARTS, STRIPS, BM, dtype, s_type, z_type, K_TAIL)
            x2 = load_step(
                ahead + 2 * B, weights, rest, tiles_k, B, BITS, ZERO, S_WIDTH, Z_WIDTH, TILES_PER_GROUP, PARTS, K_TAIL
            )
        if DEPTH > 3:
            stay()
            acc = multiply(x3, acc, first + 3 * B, K, B, BITS, ZERO, PARTS, STRIPS, BM, dtype, s_type, z_type, K_TAIL)
            x3 = load_step(
                ahead + 3 * B, weights, rest, tiles_k, B, BITS, ZERO, S_WIDTH, Z_WIDTH, TILES_PER_GROUP, PARTS, K_TAIL
            )
        stay()

    finish(acc, pid_n, pid_m, bias_ptr, c_ptr, M, N, c_stride_m, c_stride_n, ACTIVATION)
