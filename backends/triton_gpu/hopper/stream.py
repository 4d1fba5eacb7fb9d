"""C = activation(A @ W + bias) for some rows more than decode.py takes: a ring of cp.async stages in shared memory.

As in decode.py a program owns ``STRIPS * 16`` columns and the whole of K, and its warps share out K. Where A has more
than a few rows, fetching its operand from memory word by word costs more than it hides, so that weights, A and factors
come through shared memory, STAGES - 1 steps ahead; a step is one tile of K for each warp.

Operands and arithmetic are those of decode.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from qmm.backends.triton_gpu.hopper.compat import barrier, copy_async
from qmm.backends.triton_gpu.hopper.decode import finish
from qmm.backends.triton_gpu.hopper.dequantise import centred
from qmm.backends.triton_gpu.hopper.mma_operands import by_column, group_layout, operand, over_strips


@gluon.jit
def copy_groups(
    first, slot, shared, ptrs, tile, columns, tiles_k, padded_n, K,
    BLOCK: gl.constexpr, TILES_PER_GROUP: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Start copying the scales (or zeros) of B tiles from tile ``first`` on; what lies outside keeps old values."""
    for part in gl.static_range(PARTS):
        if TILES_PER_GROUP == 0:
            group = tile * 0
        else:
            group = (first + tile) // TILES_PER_GROUP * PARTS + part
        inside = columns & (first + tile < tiles_k) & (group * (BLOCK // PARTS) * TILES_PER_GROUP < K)
        copy_async(shared.index(slot * PARTS + part), ptrs + group.to(gl.int64) * padded_n, mask=inside)


@gluon.jit
def issue_weights(step, weights, tiles_k, B: gl.constexpr, STAGES: gl.constexpr):
    """Start copying the weights of step ``step``; what lies outside keeps the slot's older contents."""
    w_s, w_ptrs, w_tile, columns = weights
    first = step * B
    inside = columns & (first + w_tile < tiles_k)
    copy_async(
        w_s.index(step % STAGES),
        w_ptrs + first.to(gl.int64) * 1024,
        mask=inside,
        eviction_policy="evict_first",
    )


@gluon.jit
def issue_rest(
    step, rest, tiles_k, padded_n, K, B: gl.constexpr, BITS: gl.constexpr, ZERO: gl.constexpr,
    TILES_PER_GROUP: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, K_TAIL: gl.constexpr,
):  # fmt: skip
    """Start copying A and the factors of step ``step``, and close its group of copies."""
    a_s, s_s, z_s, a_ptrs, a_k, rows, s_ptrs, z_ptrs, g_tile, columns = rest
    BLOCK: gl.constexpr = 256 // BITS
    first = step * B
    slot = step % STAGES
    if K_TAIL:  # whole 16 bytes: a mask that Triton knows less of makes copies of 2, which cp.async does not do
        inside = rows & (first * BLOCK + a_k < gl.cdiv(K, 8) * 8)
    else:
        inside = rows & (first * BLOCK + a_k < tiles_k * BLOCK)
    copy_async(a_s.index(slot), a_ptrs + first * BLOCK, mask=inside)
    copy_groups(first, slot, s_s, s_ptrs, g_tile, columns, tiles_k, padded_n, K, BLOCK, TILES_PER_GROUP, PARTS)
    if ZERO != "none":
        copy_groups(first, slot, z_s, z_ptrs, g_tile, columns, tiles_k, padded_n, K, BLOCK, TILES_PER_GROUP, PARTS)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["M", "a_stride_m8", "c_stride_m", "c_stride_n"])
def stream_kernel(
    a_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, c_ptr, M, N, K, a_stride_m8, c_stride_m, c_stride_n,
    BITS: gl.constexpr, ZERO: gl.constexpr, TILES_PER_GROUP: gl.constexpr, PARTS: gl.constexpr,
    ACTIVATION: gl.constexpr, STRIPS: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    RAGGED: gl.constexpr, K_TAIL: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Tile ``program_id`` of C: columns first, then rows.

    B tiles of K, one a warp, are one step. A group is TILES_PER_GROUP tiles (0: all of K), or a tile has PARTS groups.
    RAGGED: K is no whole number of steps. What a step does not read is zeros, as Triton fills a masked cp.async, or at
    worst the slot's older values: of the same rows of A, and met by scale 0 or, in a padded tile (K_TAIL), by code MID.
    """
    B: gl.constexpr = gl.num_warps()
    BN: gl.constexpr = STRIPS * 16
    BLOCK: gl.constexpr = 256 // BITS
    PRODUCTS: gl.constexpr = 16 // BITS // PARTS
    PART: gl.constexpr = BLOCK // PARTS
    MID: gl.constexpr = 1 << (BITS - 1)
    dtype: gl.constexpr = a_ptr.dtype.element_ty
    s_type: gl.constexpr = s_ptr.dtype.element_ty
    z_type: gl.constexpr = s_type if ZERO == "none" else z_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[B, 1, 1], instr_shape=[1, 16, 8]
    )
    dot_w: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    dot_a: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    row: gl.constexpr = gl.SliceLayout(2, mma)
    flat: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32, 1], [B, 1, 1], [2, 1, 0])
    a_copy: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [B, 1, 1], [2, 1, 0])
    # at most one tile's columns a thread: what lies side by side
    g_copy: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2 * STRIPS if STRIPS <= 4 else 8], [4, 8, 1] if STRIPS <= 4 else [2, 8, 2], [B, 1, 1], [2, 1, 0]
    )
    held: gl.constexpr = group_layout(B, 2 * STRIPS)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    COLUMNS: gl.constexpr = BLOCK // 8  # of 16 bytes in a row of A
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 8 // COLUMNS, COLUMNS, [2, 1, 0])

    tiles_n = gl.cdiv(N, BN)
    pid_n = gl.program_id(0) % tiles_n
    pid_m = gl.program_id(0) // tiles_n
    tiles_k = gl.cdiv(K, BLOCK)
    padded_n = gl.cdiv(N, 64) * 64
    strip0 = pid_n * STRIPS % 4
    tile_n = pid_n * STRIPS // 4

    w_s = gl.allocate_shared_memory(gl.int16, [STAGES, B, STRIPS * 32, 8], plain)
    a_s = gl.allocate_shared_memory(dtype, [STAGES, B, BM, BLOCK], swizzled)
    s_s = gl.allocate_shared_memory(s_type, [STAGES * PARTS, B, 8, 2 * STRIPS], plain)
    z_s = s_s
    if ZERO != "none":
        z_s = gl.allocate_shared_memory(z_type, [STAGES * PARTS, B, 8, 2 * STRIPS], plain)

    # weights: tile b of K at 1024 b units
    w_tile = gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(2, flat)))[:, None, None]
    lane = gl.arange(0, STRIPS * 32, gl.SliceLayout(0, gl.SliceLayout(2, flat)))[None, :, None]
    unit = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, flat)))[None, None, :]
    w_base = w_ptr + tile_n.to(gl.int64) * tiles_k * 1024 + strip0 * 256
    w_ptrs = w_base + (lane // 128 * tiles_k * 1024 + w_tile * 1024 + lane % 128 * 8 + unit)
    # activations: BM rows of BLOCK for every tile
    a_tile = gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(2, a_copy)))[:, None, None]
    a_row = pid_m * BM + gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(2, a_copy)))[None, :, None]
    a_k = a_tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, a_copy)))[None, None, :]
    a_ptrs = a_ptr + a_row.to(gl.int64) * a_stride_m8 * 8 + a_k
    # scales and zeros: column n of a tile stands at g * 8 + strip * 2 + r8
    g_tile = gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(2, g_copy)))[:, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, g_copy)))[None, :, None]
    value = gl.arange(0, 2 * STRIPS, gl.SliceLayout(0, gl.SliceLayout(1, g_copy)))[None, None, :]
    g_at = tile_n * 64 + strip0 * 2 + value // 8 * 64 + g * 8 + value % 8 + g_tile * 0
    z_ptrs = s_ptr + g_at
    if ZERO != "none":
        z_ptrs = z_ptr + g_at
    tile_of = gl.arange(0, B, gl.SliceLayout(1, row))[:, None]

    if RAGGED:
        for i in gl.static_range(STAGES):
            a_s.index(i).store(gl.zeros([B, BM, BLOCK], dtype, a_copy))
        barrier()  # a copy may write what another thread has set to 0
    w_columns = lane >= 0
    g_columns = value >= 0
    if STRIPS > 4:  # the second of two tiles may be outside
        w_columns = (tile_n + lane // 128) * 64 < N
        g_columns = (tile_n + value // 8) * 64 < N
    weights = (w_s, w_ptrs, w_tile, w_columns)
    rest = (a_s, s_s, z_s, a_ptrs, a_k, a_row < M, s_ptr + g_at, z_ptrs, g_tile, g_columns)
    for i in gl.static_range(STAGES - 1):
        issue_weights(gl.to_tensor(i), weights, tiles_k, B, STAGES)
    if DEPENDENT:  # everything but the weights may be what the kernel before this one writes
        gdc_launch_dependents()
        gdc_wait()
    for i in gl.static_range(STAGES - 1):
        issue_rest(
            gl.to_tensor(i), rest, tiles_k, padded_n, K, B, BITS, ZERO, TILES_PER_GROUP, PARTS, STAGES, K_TAIL
        )
    acc = gl.zeros([B, BN, BM], gl.float32, mma)
    for i in range(0, gl.cdiv(tiles_k, B)):
        # all reads of this step come before the next copy is issued: the compiler puts a barrier between the two
        async_copy.wait_group(STAGES - 2)
        here = i % STAGES
        units = w_s.index(here).load(flat)
        a_here = a_s.index(here).permute((0, 2, 1))
        a = load_parts(a_here, PART, PARTS, dot_a)
        s = load_factors(s_s, here, PARTS, held)
        z = s
        if ZERO != "none":
            z = load_factors(z_s, here, PARTS, held)
        issue_weights(i + STAGES - 1, weights, tiles_k, B, STAGES)
        issue_rest(
            i + STAGES - 1, rest, tiles_k, padded_n, K, B, BITS, ZERO, TILES_PER_GROUP, PARTS, STAGES, K_TAIL
        )
        codes = centred(units, BITS, dtype)
        inside = (i * B + tile_of < tiles_k) | (not RAGGED)
        for part in gl.static_range(PARTS):
            partial = gl.zeros([B, BN, BM], gl.float32, mma)
            partial = mma_v2(operand(codes, part, B, STRIPS, PRODUCTS, dot_w), a[part], partial)
            scale = gl.where(inside, by_column(s[part], B, STRIPS, s_type, row), 0.0)
            acc = acc + partial * gl.expand_dims(scale, 2)
            if ZERO != "none":
                ones = gl.full([B, 16, PART], 1.0, dtype, dot_w)
                if K_TAIL:  # padded rows of K must not count
                    tile = gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(2, dot_w)))[:, None, None] + i * B
                    k = gl.arange(0, PART, gl.SliceLayout(0, gl.SliceLayout(1, dot_w)))[None, None, :]
                    ones = gl.where(tile * BLOCK + part * PART + k < K, ones, 0.0)
                a_sum = mma_v2(ones, a[part], gl.zeros([B, 16, BM], gl.float32, mma))
                zero = by_column(z[part], B, STRIPS, z_type, row)
                if ZERO == "bias":
                    offset = zero + scale * MID
                else:
                    offset = scale * (MID - zero)
                acc = acc + over_strips(a_sum, STRIPS, mma) * gl.expand_dims(gl.where(inside, offset, 0.0), 2)
    async_copy.wait_group(0)
    finish(acc, pid_n, pid_m, bias_ptr, c_ptr, M, N, c_stride_m, c_stride_n, ACTIVATION)


@gluon.jit
def load_parts(a_here, PART: gl.constexpr, PARTS: gl.constexpr, dot_a: gl.constexpr):
    """A's operand for every part of the tile."""
    if PARTS == 1:
        return (a_here.load(dot_a),)
    else:
        return a_here.slice(0, PART, dim=1).load(dot_a), a_here.slice(PART, PART, dim=1).load(dot_a)


@gluon.jit
def load_factors(shared, here, PARTS: gl.constexpr, held: gl.constexpr):
    """Scales or zeros for every part of the tile."""
    if PARTS == 1:
        return (shared.index(here).load(held),)
    else:
        return shared.index(here * 2).load(held), shared.index(here * 2 + 1).load(held)
