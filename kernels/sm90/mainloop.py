"""Mainloop: operand tiles by TMA into a ring of stages, consumed by wgmma.

A stage is full when its bytes have landed (one arrival, by the producer's expect-tx) and empty when every consumer
warp of every CTA that shares one of its operands has arrived.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def next_stage(stage: Int32, phase: Int32, stages: cutlass.Constexpr):
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


@cute.jit
def skip_stages(stage: Int32, phase: Int32, count: Int32, stages: cutlass.Constexpr):
    """The state after `count` stages that somebody else consumes."""
    moved = stage + count
    wraps = moved // stages
    return moved - wraps * stages, phase ^ (wraps & 1)


@cute.jit
def load_tile(copy_a, copy_b, k_tiles: Int32, stage: Int32, phase: Int32, full, empty, stage_bytes: cutlass.Constexpr,
              stages: cutlass.Constexpr):
    """Producer: issues the loads of one tile's k steps. `copy_*(k, stage, barrier)` start one operand's load."""
    for k in cutlass.range(k_tiles, unroll=1):
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, stage_bytes)
        copy_a(k, stage, full + stage)
        copy_b(k, stage, full + stage)
        stage, phase = next_stage(stage, phase, stages)
    return stage, phase


@cute.jit
def release(empty, stage: Int32, shares):
    """One arrival a warp at this stage's empty barrier in every CTA that shares an operand with this one.

    `shares` is (lane signals a CTA, that CTA's rank), or None outside clusters.
    """
    if cutlass.const_expr(shares is None):
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(empty + stage)
    else:
        signals, rank = shares
        if signals:
            cute.arch.mbarrier_arrive(empty + stage, rank)


def sharing_ctas(cluster_m: int, cluster_n: int) -> int:
    """CTAs of a cluster that share an operand with one of them, itself included: its row and its column."""
    return cluster_m + cluster_n - 1


def shares_of_lane(cluster_m: int, cluster_n: int):
    """Which CTA this lane signals in `release`; ranks count M first."""
    if cluster_m * cluster_n == 1:
        return None
    lane = cute.arch.lane_idx()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    same = (lane % cluster_m == rank % cluster_m) | (lane // cluster_m == rank // cluster_m)
    return (lane < cluster_m * cluster_n) & same, lane


@cute.jit
def multiply_tile(mma_first, mma, acc, frag_a, frag_b, k_tiles: Int32, stage: Int32, phase: Int32, full, empty,
                  stages: cutlass.Constexpr, shares, hand_over, amend=None):
    """Consumer: acc = A B over one tile's k steps; `hand_over()` runs once every wgmma is issued, and `amend(stage)`,
    if there is any, when the first step's operands are there.

    One k step stays in flight while the next one is issued, so a stage is released one step late.
    """
    k_blocks = cutlass.const_expr(cute.size(frag_a, mode=[2]))
    cute.arch.mbarrier_wait(full + stage, phase)
    if cutlass.const_expr(amend is not None):
        amend(stage)
    warpgroup.fence()
    for k in cutlass.range_constexpr(k_blocks):
        at = (None, None, k, stage)
        cute.gemm(mma_first if k == 0 else mma, acc, frag_a[at], frag_b[at], acc)
    warpgroup.commit_group()
    last = stage
    stage, phase = next_stage(stage, phase, stages)
    for _ in cutlass.range(k_tiles - 1, unroll=1):
        cute.arch.mbarrier_wait(full + stage, phase)
        warpgroup.fence()
        for k in cutlass.range_constexpr(k_blocks):
            at = (None, None, k, stage)
            cute.gemm(mma, acc, frag_a[at], frag_b[at], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        release(empty, last, shares)
        last = stage
        stage, phase = next_stage(stage, phase, stages)
    hand_over()
    warpgroup.wait_group(0)
    release(empty, last, shares)
    return stage, phase
