"""Attention by our own Triton kernels, the default for every program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backends.cuda.kernels.attention import AttentionWorkspace, decode_programs, paged_attention

if TYPE_CHECKING:
    import torch

    from penstock.backends.cuda.attention import AttentionShape
    from penstock.backends.cuda.kv_cache import KvLayer
    from penstock.backends.cuda.step import StepTensors


@dataclass(frozen=True, slots=True, eq=False)
class TritonAttention:
    """Computes the attention of steps by our own Triton kernels."""

    workspace: AttentionWorkspace
    deterministic: bool

    @staticmethod
    def allocate(
        shape: AttentionShape, *, max_rows: int, num_positions: int, device: torch.device, deterministic: bool
    ) -> TritonAttention:
        """Make the attention of all layers. Heads of all layers must have one shape."""
        workspace = AttentionWorkspace.allocate(
            max_rows=max_rows,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_model_len=num_positions,
            device=device,
            deterministic=deterministic,
        )
        return TritonAttention(workspace, deterministic)

    def decode_programs(self, num_rows: int, max_seq_len: int, shape: AttentionShape) -> int:
        """Return a decode's GPU programs per row and KV head, or 0 if the prefill kernel computes it."""
        return decode_programs(
            self.workspace,
            num_rows=num_rows,
            max_seq_len=max_seq_len,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            deterministic=self.deterministic,
        )

    def begin(self, step: StepTensors) -> None:
        """Do nothing: our kernels need no preparation."""

    def attend(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        layer: KvLayer,
        step: StepTensors,
        shape: AttentionShape,
        sinks: torch.Tensor | None = None,
    ) -> None:
        paged_attention(
            out,
            q,
            layer,
            step,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.scale,
            window=shape.window,
            softcap=shape.softcap,
            workspace=self.workspace,
            deterministic=self.deterministic,
            sinks=sinks,
        )
