"""Queues all of a step: its message, the forward pass, what its rows sample, and the copy of that to the host.

Made and called by the executor, once for each step. Owns what steps are launched with: the device's tables, the sampler, the
pinned memory. Never keeps a request or a step in flight, and no step waits here for the device.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.cuda.flight import Flight
from penstock.backends.cuda.forward import ForwardPass, is_decode
from penstock.backends.cuda.sampling import SampledWords, Sampler
from penstock.backends.cuda.staging import Download, Upload, message_words, padding, step_arrays
from penstock.backends.cuda.tables import Patches, RowTables

if TYPE_CHECKING:
    import torch

    from penstock.backends.batch import BatchBuilder, StepBatch
    from penstock.backends.cuda.attention_choice import AttentionChoice
    from penstock.backends.cuda.graphs import DecodeGraphs
    from penstock.backends.cuda.kv_cache import PagedKvCache
    from penstock.backends.cuda.lowering import CompiledProgram
    from penstock.backends.cuda.stream import Stream
    from penstock.types.plan import Capacity, StepPlan


class StepLauncher:
    """Of an executor whose stream was entered."""

    def __init__(
        self,
        capacity: Capacity,
        program: CompiledProgram,
        attention: AttentionChoice,
        cache: PagedKvCache,
        *,
        vocab_size: int,
        max_tokens: int,
        depth: int,
        stream: Stream,
        device: torch.device,
    ) -> None:
        """`max_tokens`: of a step, padding among them."""
        self._cache, self._stream = cache, stream
        self.tables = RowTables(capacity, vocab_size=vocab_size, device=device)
        self._sampler = Sampler(self.tables, vocab_size=vocab_size)
        self._upload = Upload(message_words(capacity), depth=depth, stream=stream, device=device)
        result_words = SampledWords(capacity.max_rows, capacity.max_rows).end
        self._download = Download(result_words, depth=depth, stream=stream, device=device)
        self._forward = ForwardPass(
            program, attention, self.tables, max_tokens=max_tokens, max_rows=capacity.max_rows, device=device
        )

    def launch(
        self, plan: StepPlan, batch: StepBatch, host: BatchBuilder, graphs: DecodeGraphs | None, began_ns: int
    ) -> Flight:
        """Queue all of a step, which `host` made `batch` of; `began_ns`: when the host's work for it began."""
        self._forget_stale_blocks(plan)
        patches = self._patches(plan, batch, host)
        slots = batch.row_slots[batch.sample_rows]
        positions = host.num_tokens[slots]
        sample_plan = self._sampler.prepare(slots, positions)
        graphs = graphs if is_decode(batch) else None
        num_rows = batch.num_rows if graphs is None else graphs.padded_rows(batch.num_rows)
        arrays = step_arrays(batch, self.tables, num_rows=num_rows)
        sent = self._upload.send([*arrays, slots, positions, *sample_plan.arrays, *patches.arrays()])
        # Not before the message: an idle device would come past the mark at once, and the host's work would be called its own.
        begun = self._stream.mark()
        if len(sent[-1]):
            self.tables.apply(sent[-2], sent[-1])
        num_parts = len(arrays)
        sample_slots, sample_positions, *lists = sent[num_parts:-2]
        logits = self._forward.run(batch, sent[:num_parts], graphs)
        computed = self._stream.mark()
        where = SampledWords(0, 0)
        if logits is not None:
            where = self._sampler.choose(
                logits[: len(slots)], sample_slots, sample_positions, sample_plan, lists, self._download.words
            )
        words = self._download.fetch(where.end)
        ended = self._stream.mark()
        names = [batch.request_ids[row] for row in batch.sample_rows.tolist()]
        host_ns = time.monotonic_ns() - began_ns
        return Flight(plan.step_id, names, sample_plan, where, words, host_ns, begun, computed, ended)

    def run_padding(self, num_rows: int, limit: int, graphs: DecodeGraphs | None) -> None:
        """The forward pass of a decode whose rows are all padding, as one of rows up to `limit` long; waits for it."""
        batch = padding(self.tables)
        sent = self._upload.send(step_arrays(batch, self.tables, num_rows=num_rows))
        self._forward.run(batch, sent, graphs, least_seq_len=limit)
        self._stream.mark().wait()  # so that the pinned memory may be written to again

    def _patches(self, plan: StepPlan, batch: StepBatch, host: BatchBuilder) -> Patches:
        """What changes in the device's tables before the step: admitted rows in full, and new blocks."""
        patches, tables = Patches(), self.tables
        for slot in batch.released:
            self._sampler.release(slot)
        admitted = set()
        for slot, row in batch.admitted:
            admitted.add(slot)
            patches.add(tables.at(tables.tokens, slot), host.tokens[slot, : host.num_tokens[slot]])
            patches.add(tables.at(tables.block_tables, slot), host.block_tables[slot, : host.num_blocks[slot]])
            self._sampler.admit(slot, row, patches)
        for slot, planned in zip(batch.row_slots.tolist(), plan.rows, strict=True):
            if planned.new_block_ids and slot not in admitted:
                begin = int(host.num_blocks[slot]) - len(planned.new_block_ids)
                patches.add(tables.at(tables.block_tables, slot, begin), np.array(planned.new_block_ids, np.int32))
        return patches

    def _forget_stale_blocks(self, plan: StepPlan) -> None:
        for admit in plan.admits:
            self._cache.forget(admit.block_ids, admit.num_computed_tokens)
        for row in plan.rows:
            if row.new_block_ids:
                self._cache.forget(row.new_block_ids, 0)
