"""Finds operations of a program that can share a kernel, or write to adjacent columns, for `lowering` and `buffers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.models.program import (
    FirstRows,
    GatedActivation,
    GatherRows,
    KvWrite,
    Linear,
    MeanRows,
    Op,
    RMSNorm,
    Rope,
)

Gather = GatherRows | FirstRows | MeanRows
"""Operations after which buffers have a row per sample."""


def linear_run(ops: Sequence[Op], at: int) -> list[Linear]:
    """Return the linear operations from index `at` on that can be one product, because they share their input."""
    run: list[Linear] = []
    for op in ops[at:]:
        if not isinstance(op, Linear):
            break
        if run and (op.x != run[0].x or op.residual is not None or run[0].residual is not None):
            break
        if run and (op.out == op.x or op.out in {other.out for other in run} or run[0].out == op.x):
            break
        run.append(op)
    return run


def is_read(ops: Sequence[Op], name: str, at: int) -> bool:
    for op in ops[at:]:
        if op.reads(name):
            return True
        if getattr(op, "out", None) == name:
            return False
    return False


def gated_at(ops: Sequence[Op], at: int) -> tuple[list[Linear], GatedActivation] | None:
    """Match a gate and up projection and their activation from index `at` on. None if something else reads the projections."""
    run, following = linear_run(ops, at), ops[at + 2 : at + 3]
    if len(run) != 2 or not following or not isinstance(act := following[0], GatedActivation):
        return None
    if (act.gate, act.up) != (run[0].out, run[1].out) or act.out in (act.gate, act.up, run[0].x):
        return None
    return None if any(is_read(ops, name, at + 3) for name in (act.gate, act.up)) else (run, act)


def normed_sum_at(ops: Sequence[Op], at: int) -> tuple[Linear, RMSNorm] | None:
    """Match a linear operation with residual at index `at` and the norm of its result. Otherwise return None."""
    found = ops[at : at + 2]
    if len(found) < 2 or not isinstance(op := found[0], Linear) or not isinstance(norm := found[1], RMSNorm):
        return None
    fits = op.residual is not None and norm.x == op.out and norm.group == 0 and norm.out != op.out
    return (op, norm) if fits and op.x not in (op.out, norm.out) else None


def written_keys_at(ops: Sequence[Op], at: int) -> tuple[Rope, Rope, KvWrite] | None:
    """Match rotations of queries and keys and the KV cache write from index `at` on. None if something else reads the keys."""
    found = ops[at : at + 3]
    if len(found) < 3:
        return None
    queries, keys, write = found
    if not (isinstance(queries, Rope) and isinstance(keys, Rope) and isinstance(write, KvWrite)):
        return None
    same = replace(queries, x=keys.x, num_heads=keys.num_heads) == keys
    fits = keys.x == write.k != queries.x and queries.num_heads % keys.num_heads == 0
    return (queries, keys, write) if same and fits and not is_read(ops, write.k, at + 3) else None
