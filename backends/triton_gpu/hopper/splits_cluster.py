"""Splits of K: a cluster of programs shares a tile of C, and adds up through distributed shared memory.

Program ``rank`` of the cluster has split ``rank`` of K. The tile's rows are dealt out: each program sends every other
one that one's rows of its own partial sums, and adds up its own rows from all of them, in the order of the splits, so
that the bits never change. Nothing goes through global memory, and nobody waits for more than the slowest split.

The barrier of a cluster counts every thread of all its programs: each has to come by ``arrive`` when it starts (so that
nobody sends to a program that has not begun), and by ``join`` or ``pass_by`` once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _join_asm(registers, splits):
    """Of a thread's ``registers`` partial sums the first ``registers / splits`` come back, summed; the others as 0.

    The buffer is ``[splits - 1, share / 4, 128 threads, 4]`` float32: from each other program its sums of our rows.
    """
    share = registers // splits
    lines = [
        f".shared .align 16 .b8 sums[{(splits - 1) * share * 512}];",
        ".reg .pred p;",
        ".reg .b32 rank, here, at, slot;",
        f".reg .f32 own<{share}>, got<{share}>, total<{share}>;",
        "mov.u32 rank, %cluster_ctarank;",
        "mov.u32 here, %tid.x;",
        "and.b32 here, here, 127;",
        "shl.b32 here, here, 4;",
        "mov.u32 at, sums;",
        "add.u32 here, here, at;",
        "barrier.cluster.wait.acquire;",
    ]
    for to in range(splits):
        mine = [f"${registers + to * share + i}" for i in range(share)]
        lines += [  # the slots of program `to` are of all others, in their order
            f"setp.gt.u32 p, rank, {to};",
            "selp.b32 slot, 1, 0, p;",
            "sub.u32 slot, rank, slot;",
            f"mad.lo.u32 at, slot, {share * 512}, here;",
            f"mapa.shared::cluster.u32 at, at, {to};",
            f"setp.ne.u32 p, rank, {to};",
        ]
        for i in range(0, share, 4):
            lines.append(f"@p st.shared::cluster.v4.f32 [at+{i * 512}], {{{', '.join(mine[i : i + 4])}}};")
        lines.append(f"setp.eq.u32 p, rank, {to};")
        lines += [
            f"selp.f32 own{i}, {mine[i]}, {f'own{i}' if to else '0f00000000'}, p;" for i in range(share)
        ]
    lines += ["barrier.cluster.arrive.release;", "barrier.cluster.wait.acquire;"]
    for of in range(splits):
        lines += [
            f"setp.lt.u32 p, rank, {of};",
            f"selp.b32 slot, {of - 1}, {min(of, splits - 2)}, p;" if of else "mov.u32 slot, 0;",
            f"mad.lo.u32 at, slot, {share * 512}, here;",
        ]
        for i in range(0, share, 4):
            lines.append(
                f"ld.shared.v4.f32 {{{', '.join(f'got{j}' for j in range(i, i + 4))}}}, [at+{i * 512}];"
            )
        lines.append(f"setp.eq.u32 p, rank, {of};")
        for i in range(share):
            lines.append(f"selp.f32 got{i}, own{i}, got{i}, p;")
            lines.append(f"add.f32 total{i}, total{i}, got{i};" if of else f"mov.f32 total{i}, got{i};")
    lines += [f"mov.f32 ${i}, total{i};" for i in range(share)]
    lines += [f"mov.f32 ${i}, 0f00000000;" for i in range(share, registers)]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _join_constraints(registers):
    return ",".join(["=&f"] * registers + ["f"] * registers)


@gluon.jit
def _every_thread(ASM: gl.constexpr):
    z = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(ASM, "=r,r", [z], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive():
    """Every thread, when it starts."""
    _every_thread("barrier.cluster.arrive.release; mov.b32 $0, $1;")


@gluon.jit
def pass_by():
    """Threads that have nothing to add up, when they end."""
    _every_thread(
        "barrier.cluster.wait.acquire; barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.b32 $0, $1;"
    )


@gluon.jit
def join(acc, BM: gl.constexpr, SPLIT: gl.constexpr):
    """Accumulators ``[64, BM]`` of SPLIT programs -> the sum of this one's rows, ``[64, BM / SPLIT]``."""
    REGISTERS: gl.constexpr = BM // 2
    acc = gl.inline_asm_elementwise(
        _join_asm(REGISTERS, SPLIT), _join_constraints(REGISTERS), [acc], dtype=gl.float32, is_pure=False,
        pack=REGISTERS,
    )  # fmt: skip
    acc = first_half(acc)
    if SPLIT >= 4:
        acc = first_half(acc)
    if SPLIT >= 8:
        acc = first_half(acc)
    return acc


@gluon.jit
def first_half(x):
    """``[64, 2 R]`` -> ``[64, R]``, the first R; no data moves."""
    R: gl.constexpr = x.shape[1] // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, R, 16]
    )
    first, _ = gl.split(gl.permute(gl.reshape(x, (64, 2, R)), (0, 2, 1)))
    return gl.convert_layout(first, mma, assert_trivial=True)
