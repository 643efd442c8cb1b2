"""Queues a step's GPU work: the copy of its inputs, forward pass, sampling, and the copy of results to the host."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backends.cuda.flight import Flight, UnsampledStep
from penstock.backends.cuda.forward import ForwardPass, is_decode
from penstock.backends.cuda.sampling import SampledWords, Sampler
from penstock.backends.cuda.staging import Download, Upload, mask_message_words, message_words, padding, step_arrays
from penstock.backends.cuda.tables import Patches, RowTables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.batch import BatchBuilder, StepBatch
    from penstock.backends.cuda.adapters import PlacedAdapters
    from penstock.backends.cuda.attention_choice import AttentionChoice
    from penstock.backends.cuda.graphs import DecodeGraphs
    from penstock.backends.cuda.kv_cache import PagedKvCache
    from penstock.backends.cuda.lowering import CompiledProgram
    from penstock.backends.cuda.sample_plan import SamplePlan
    from penstock.backends.cuda.stream import Mark, Stream
    from penstock.types.plan import Capacity, StepPlan


class StepLauncher:
    """Queues steps of a model that generates tokens. The caller must have entered the stream."""

    def __init__(
        self,
        capacity: Capacity,
        program: CompiledProgram,
        attention: AttentionChoice,
        cache: PagedKvCache,
        *,
        vocab_size: int,
        max_tokens: int,
        adapters: PlacedAdapters | None,
        depth: int,
        stream: Stream,
        device: torch.device,
    ) -> None:
        """`max_tokens`: most tokens of a step, with padding."""
        self._cache, self._adapters, self._stream = cache, adapters, stream
        self.tables = RowTables(capacity, vocab_size=vocab_size, device=device)
        self._sampler = Sampler(self.tables, vocab_size=vocab_size)
        num_words = message_words(capacity, has_adapters=adapters is not None)
        self._upload = Upload(num_words, depth=depth, stream=stream, device=device)
        # A second upload for masks: an upload reuses its buffers `depth` messages later, and a step may send two messages.
        # Allocated at startup, because pinning memory can stall the device, and the profile run must count device memory.
        mask_words = mask_message_words(capacity, vocab_size)
        self._mask_upload = Upload(mask_words, depth=depth, stream=stream, device=device)
        result_words = SampledWords(capacity.max_rows, capacity.max_rows).end
        words = torch.zeros(result_words, dtype=torch.int32, device=device)
        self._download = Download(words, depth=depth, stream=stream)
        self._forward = ForwardPass(
            program, attention, self.tables, max_tokens=max_tokens, max_rows=capacity.max_rows, device=device
        )

    def launch(
        self, plan: StepPlan, batch: StepBatch, host: BatchBuilder, graphs: DecodeGraphs | None, began_ns: int
    ) -> Flight | UnsampledStep:
        """Queue a step, without sampling if a request awaits a grammar mask.

        `host`: the builder of `batch`. `began_ns`: when the host began to work on the step.
        """
        self._forget_stale_blocks(plan)
        patches = self._patches(plan, batch, host)
        slots = batch.row_slots[batch.sample_rows]
        sample_plan = self._sampler.prepare(slots, host.num_tokens[slots])
        waits = len(sample_plan.followers) > 0
        sampling = {} if waits else sample_plan.arrays()
        grouped = None if self._adapters is None else self._adapters.arrays(batch, host)
        # Graphs have no launches for adapters, so steps with adapters run without a graph.
        graphs = graphs if grouped is None and is_decode(batch) else None
        num_rows = batch.num_rows if graphs is None else graphs.padded_rows(batch.num_rows)
        arrays = step_arrays(batch, self.tables, num_rows=num_rows)
        of_adapters = () if grouped is None else grouped.arrays
        sent = self._upload.send([*arrays, *of_adapters, *sampling.values(), *patches.arrays()])
        # Mark only after the message: an idle device passes a mark at once, and would count the host's work as its own.
        begun = self._stream.mark()
        if len(sent[-1]):
            self.tables.apply(sent[-2], sent[-1])
        num_arrays, num_parts = len(arrays), len(arrays) + len(of_adapters)
        adapted = (None, None) if grouped is None else grouped.on_device(sent[num_arrays:num_parts])
        logits = self._forward.run(batch, sent[:num_arrays], graphs, adapted=adapted)
        computed = self._stream.mark()
        names = [batch.request_ids[row] for row in batch.sample_rows.tolist()]
        logits = None if logits is None else logits[: len(slots)]
        host_ns = time.monotonic_ns() - began_ns
        step = UnsampledStep(plan.step_id, names, sample_plan, logits, host_ns, begun, computed)
        if waits:
            return step
        return self._sample(step, sample_plan, dict(zip(sampling, sent[num_parts:-2], strict=True)), computed)

    def restrict(self, step: UnsampledStep, masks: Mapping[int, bytes]) -> Flight:
        """Send grammar masks, by the sample's index in the step, and queue the sampling that awaits them.

        The sampling arrays are sent again, because the first message may be overwritten by now.
        """
        began_ns = time.monotonic_ns()
        plan = step.plan.masked_by(masks)
        arrays = plan.arrays()
        sent = self._mask_upload.send(list(arrays.values()))
        resumed = self._stream.mark()  # after the message, as in `launch`
        step = replace(step, host_ns=step.host_ns + time.monotonic_ns() - began_ns)
        return self._sample(step, plan, dict(zip(arrays, sent, strict=True)), resumed)

    def _sample(self, step: UnsampledStep, plan: SamplePlan, sent: Mapping[str, torch.Tensor], resumed: Mark) -> Flight:
        began_ns = time.monotonic_ns()
        where = SampledWords(0, 0)
        if step.logits is not None:
            where = self._sampler.choose(step.logits, plan, sent, self._download.words)
        words = self._download.fetch(where.end)
        ended = self._stream.mark()
        return Flight(
            step.step_id,
            step.names,
            plan,
            where,
            words,
            step.host_ns + time.monotonic_ns() - began_ns,
            step.begun,
            step.computed,
            resumed,
            ended,
        )

    def run_padding(self, num_rows: int, limit: int, graphs: DecodeGraphs | None) -> None:
        """Run a decode of padding rows, to capture its CUDA graph, and wait. `limit`: longest sequence."""
        batch = padding(self.tables)
        sent = self._upload.send(step_arrays(batch, self.tables, num_rows=num_rows))
        self._forward.run(batch, sent, graphs, least_seq_len=limit)
        self._stream.mark().wait()  # the pinned memory is free only then

    def run_adapted_padding(self, number: int) -> None:
        """Run a padding row with a LoRA adapter, to compile kernels, and wait."""
        assert self._adapters is not None, "adapters are enabled"
        batch = padding(self.tables)
        arrays, numbers = step_arrays(batch, self.tables, num_rows=1), np.array([number], np.int64)
        grouped = self._adapters.grouped(numbers, numbers)
        sent = self._upload.send([*arrays, *grouped.arrays])
        self._forward.run(batch, sent[: len(arrays)], None, adapted=grouped.on_device(sent[len(arrays) :]))
        self._stream.mark().wait()  # as in `run_padding`

    def _patches(self, plan: StepPlan, batch: StepBatch, host: BatchBuilder) -> Patches:
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
