"""The arithmetic gives what one computes by hand for models that everybody knows, and no batch is better than it can be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.lab.cost_model import CostModel, Fitted
from penstock.lab.hardware import Hardware, find, known_hardware
from penstock.lab.sizing import (
    BOUND_ROWS,
    ModelSize,
    arithmetic,
    batch_point,
    batch_table,
    bounds,
    decode_shape,
    fit_in,
    format_number,
    format_time,
    fullest_batch,
    knee_rows,
    largest_batch,
    lengths_of,
    prompt_alone_ns,
    roofline,
    size_of,
    speeds,
    token_ops,
    with_more_bandwidth,
    with_more_compute,
    work_of,
)
from penstock.lab.workload import Job
from penstock.models.architectures import describe
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import ExpertsMlp, ModelSpec, spec_of_equal_layers
from penstock.types.plan import Capacity, StepShape

CAPACITY = Capacity(num_blocks=1001, block_size=16, max_rows=64, max_step_tokens=512, max_model_len=2048)


def llama(**sizes: int) -> ModelSpec:
    is_tied = bool(sizes.pop("is_tied", 0))
    return spec_of_equal_layers(
        architecture="llama",
        norm_eps=1e-5,
        tie_word_embeddings=is_tied,
        rope_inv_freq=(1.0,) * (sizes["head_dim"] // 2),
        **sizes,
    )


SMOLLM2_135M = llama(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_model_len=8192,
    is_tied=1,
)
LLAMA_3_8B = llama(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_model_len=8192,
)


def sized(spec: ModelSpec, kv_dtype: KvDtype, bytes_each: float = 2.0) -> ModelSize:
    empty = size_of(describe(spec), name="m", kv_dtype=kv_dtype, num_weight_bytes=0, num_read_bytes=0, is_quantised=False)
    num_bytes = round(empty.num_parameters * bytes_each)
    embedding = 0 if spec.tie_word_embeddings else round(spec.vocab_size * spec.hidden_size * bytes_each)
    return replace(empty, num_weight_bytes=num_bytes, num_read_bytes=num_bytes - embedding)


def job(num_prompt_tokens: int, num_output_tokens: int) -> Job:
    return Job(arrival_ns=0, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens)


LENGTHS = lengths_of([job(100, 50), job(300, 150), job(200, 100)])


def test_parameters_are_those_on_the_models_cards() -> None:
    assert sized(SMOLLM2_135M, KvDtype.INT8).num_parameters == 134_515_008
    assert sized(LLAMA_3_8B, KvDtype.BF16).num_parameters == 8_030_261_248


def test_kv_of_a_token() -> None:
    # Llama 3 8B: 2 x 32 layers x 8 KV heads x 128 columns x 2 bytes = 131,072, and here 4 bytes of scale per head and layer.
    assert sized(LLAMA_3_8B, KvDtype.BF16).kv_bytes_per_token == 131_072 + 32 * 8 * 4
    # SmolLM2: 30 layers x 3 KV heads x (64 + 64 bytes, scales in bf16: two groups of a key and one of a value).
    assert sized(SMOLLM2_135M, KvDtype.INT8).kv_bytes_per_token == 30 * 3 * (128 + 6) == 12_060


def test_work_of_a_token() -> None:
    small = sized(SMOLLM2_135M, KvDtype.INT8)
    layer = 576 * 576 * 2 + 576 * 192 * 2 + 3 * 576 * 1536  # q and o, k and v, the gated MLP
    assert small.num_token_products == 30 * layer
    assert small.num_logit_products == 49152 * 576
    assert small.num_attention_products == 30 * 9 * 64 * 2
    assert token_ops(small, 10) == 2 * (30 * layer + 30 * 9 * 64 * 2 * 10)
    assert work_of(small, decode_shape(1, 9))[0] == token_ops(small, 10) + 2 * 49152 * 576
    large = sized(LLAMA_3_8B, KvDtype.BF16)
    assert work_of(large, decode_shape(1, 0))[0] == pytest.approx(2 * (large.num_parameters - 128256 * 4096), rel=0.001)


def test_reads_of_a_decode_step() -> None:
    small = sized(SMOLLM2_135M, KvDtype.INT8)
    assert work_of(small, decode_shape(4, 99))[1] == 2 * 134_515_008 + 4 * 100 * 12_060
    large = sized(LLAMA_3_8B, KvDtype.BF16)
    assert large.num_read_bytes == 2 * (8_030_261_248 - 128256 * 4096), "only rows of the embedding are read"


def test_an_h100_has_its_knee_at_the_ratio_of_its_peaks() -> None:
    # 989e12 op/s over 3.35e12 B/s is 295 operations a byte; in bf16 a row does one operation per byte of weights.
    peaks = replace(find("H100", known_hardware()), read_share=1.0, compute_share=1.0)
    size = sized(LLAMA_3_8B, KvDtype.BF16)
    assert knee_rows(size, speeds(size, peaks)) == pytest.approx(295, abs=1)


def machine(**changes: float) -> Hardware:
    box = Hardware(
        name="box",
        description="",
        is_gpu=False,
        memory_bytes=1 << 34,
        read_bytes_per_s=50e9,
        int8_ops_per_s=2e12,
        bf16_ops_per_s=1e12,
        read_share=0.8,
        compute_share=0.5,
        step_ns=0,
        basis="",
    )
    return replace(box, **changes)  # type: ignore[arg-type]


def test_a_step_takes_as_long_as_its_reads_up_to_the_knee_and_then_as_its_products() -> None:
    size = sized(SMOLLM2_135M, KvDtype.INT8)
    cost = roofline(size, speeds(size, machine()))
    read_ns = size.num_read_bytes / 40e9 * 1e9
    kv_ns, logit_ns = 12_060 / 40e9 * 1e9, 2 * size.num_logit_products / 0.5e12 * 1e9
    assert cost.duration_ns(decode_shape(1, 99)) == pytest.approx(read_ns + 100 * kv_ns + logit_ns, rel=1e-4)
    token_ns = 2 * size.num_token_products / 0.5e12 * 1e9
    prompt = cost.duration_ns(StepShape(((512, 0),), 0))
    pairs_ns = 512 * 513 / 2 * 2 * size.num_attention_products / 0.5e12 * 1e9
    assert prompt == pytest.approx(512 * token_ns + pairs_ns, rel=0.01), "reading the weights hides behind the products"


def test_bounds_are_the_peaks_and_no_step_is_faster() -> None:
    """Work that does not overlap makes a server slower than the peaks, never faster."""
    size, box = sized(LLAMA_3_8B, KvDtype.BF16), machine(read_share=1.0, compute_share=1.0)
    most, cost = bounds(size, box), roofline(size, speeds(size, box))
    assert most.prompt_tokens_per_s == pytest.approx(box.bf16_ops_per_s / (2 * size.num_token_products))
    assert most.one_row_tokens_per_s == pytest.approx(box.read_bytes_per_s / work_of(size, decode_shape(1, 0))[1])
    assert most.one_row_tokens_per_s < most.many_rows_tokens_per_s <= BOUND_ROWS * most.one_row_tokens_per_s
    for num_rows, bound in ((1, most.one_row_tokens_per_s), (BOUND_ROWS, most.many_rows_tokens_per_s)):
        assert num_rows * 1e9 / cost.duration_ns(decode_shape(num_rows, 0)) < bound


def test_a_step_reads_the_experts_that_its_tokens_are_sent_to() -> None:
    dense = sized(SMOLLM2_135M, KvDtype.INT8)
    mixture = replace(dense, expert_share=0.8, routed_share=2 / 8)
    for rows, share_read in ((1, 0.25), (2, 0.4375), (4, 1 - 0.75**4), (64, 1.0)):
        expected = dense.num_read_bytes * (0.2 + 0.8 * share_read)
        weights = work_of(mixture, decode_shape(rows, 99))[1] - rows * 100 * 12_060
        assert weights == pytest.approx(expected, rel=1e-6)
    rates = speeds(dense, machine(int8_ops_per_s=4e13, bf16_ops_per_s=4e13))
    cost, other = roofline(mixture, rates), roofline(dense, rates)
    for rows in (1, 2, 4):
        saved_ns = other.duration_ns(decode_shape(rows, 99)) - cost.duration_ns(decode_shape(rows, 99))
        unread = dense.num_read_bytes * 0.8 * 0.75**rows
        assert saved_ns == pytest.approx(unread / rates.read_bytes_per_s * 1e9, rel=1e-4)
    many = StepShape(((512, 0),), 1)
    assert cost.duration_ns(many) == pytest.approx(other.duration_ns(many), rel=1e-4)
    assert 0 < knee_rows(mixture, rates) <= knee_rows(dense, rates)


def test_experts_are_counted_in_what_a_step_reads() -> None:
    mlp = ExpertsMlp(num_experts=8, num_experts_per_token=2, intermediate_size=14336)
    spec = replace(LLAMA_3_8B, layers=tuple(replace(layer, mlp=mlp) for layer in LLAMA_3_8B.layers))
    size = sized(spec, KvDtype.BF16)
    experts = 32 * 8 * 3 * 4096 * 14336
    assert size.routed_share == 2 / 8
    assert size.expert_share == pytest.approx(experts / (size.num_parameters - 128256 * 4096), rel=1e-3)


def test_faster_machines_have_faster_steps() -> None:
    size = sized(SMOLLM2_135M, KvDtype.INT8)
    shapes = [decode_shape(1, 100), decode_shape(32, 100), StepShape(((512, 0),), 1)]
    base, compute, bandwidth = (
        [roofline(size, speeds(size, box)).duration_ns(shape) for shape in shapes]
        for box in (machine(), machine(bf16_ops_per_s=2e12), machine(read_bytes_per_s=100e9))
    )
    assert all(fast <= slow for some in (compute, bandwidth) for fast, slow in zip(some, base, strict=True))
    assert bandwidth[0] < 0.6 * base[0], "one row is bound by reading"
    assert compute[2] < 0.6 * base[2], "a prompt is bound by multiplying"


def test_a_fitted_model_is_made_faster_in_the_parts_that_wait_for_the_resource() -> None:
    fitted = CostModel(
        sample_ns=100.0,
        narrow_read_ns=6.0,
        prefill_context_ns=2.0,
        sample_step_ns=80.0,
        cold_ns=40.0,
        token_brackets=((8, 10.0), (9, 20.0)),
        fitted=Fitted(max_rows=8, max_decodes=8, max_prefill_tokens=512, max_context_len=1024),
    )
    compute, bandwidth = with_more_compute(fitted, 2.0), with_more_bandwidth(fitted, 2.0)
    assert (compute.prefill_token_ns, compute.step_ns) == (fitted.prefill_token_ns / 2, fitted.step_ns)
    assert compute.token_brackets == ((8, 5.0), (9, 10.0))
    assert (bandwidth.step_ns, bandwidth.prefill_token_ns) == (fitted.step_ns / 2, fitted.prefill_token_ns)
    for name in ("narrow_read_ns", "prefill_context_ns", "sample_step_ns", "cold_ns"):
        before, after = getattr(fitted, name), getattr(bandwidth, name)
        assert (getattr(compute, name), after) == (before, before / 2), name


def test_lengths() -> None:
    assert (LENGTHS.mean_prompt, LENGTHS.mean_output, LENGTHS.longest) == (200, 100, 450)
    assert (LENGTHS.p50_prompt, LENGTHS.p99_prompt) == (200, 300)
    every_token = [100 + i for i in range(50)] + [300 + i for i in range(150)] + [200 + i for i in range(100)]
    assert LENGTHS.mean_context == pytest.approx(sum(every_token) / len(every_token), abs=0.5)


def test_what_fits_and_what_is_wasted() -> None:
    fit = fit_in(CAPACITY, lengths_of([job(90, 10), job(200, 56)]))  # 7 and 16 blocks
    assert fit.num_requests == 16_000 // ((7 + 16) * 16 / 2)
    assert fit.waste == pytest.approx(1 - 178 / 184)


def test_with_a_window_requests_hold_no_more_than_that() -> None:
    capacity, lengths = replace(CAPACITY, window=100), lengths_of([job(90, 10), job(200, 56)])
    fit = fit_in(capacity, lengths)  # 7 blocks each
    assert (fit.num_requests, fit.waste) == (16_000 // 112, pytest.approx(1 - 100 / 112))
    assert batch_point(10, CostModel(), lengths, capacity).kv_share == 10 * 7 / 1000


def test_blocks_of_a_recurrent_state_count_for_each_row() -> None:
    capacity, lengths = replace(CAPACITY, num_state_blocks=3), lengths_of([job(90, 10)])
    assert fit_in(capacity, lengths).num_requests == 16_000 // (10 * 16)
    assert batch_point(10, CostModel(), lengths, capacity).kv_share == 10 * (6 + 3) / 1000
    assert fullest_batch(CostModel(), lengths, replace(capacity, max_rows=512)).num_rows == 1000 // 9


def test_a_prompt_alone_is_computed_in_steps() -> None:
    cost = CostModel()
    whole = cost.duration_ns(StepShape(((512, 0),), 0)) + cost.duration_ns(StepShape(((88, 512),), 1))
    assert prompt_alone_ns(cost, 600, 512) == whole


def test_a_flow_obeys_littles_law_and_larger_batches_trade_latency_for_rate() -> None:
    table = batch_table(CostModel(), LENGTHS, CAPACITY)
    assert [point.num_rows for point in table] == [1, 2, 4, 8, 16, 32, 64]
    for point in table:
        assert point.num_rows == pytest.approx(point.rate * point.tpot_ns * LENGTHS.mean_output / 1e9)
        assert point.tpot_ns > point.decode_ns, "prompts take their part"
    for attribute in ("rate", "tpot_ns", "kv_share"):
        values = [getattr(point, attribute) for point in table]
        assert values == sorted(values), attribute
    one = batch_point(1, CostModel(), lengths_of([job(10, 100)]), CAPACITY)
    alone_ns = 100 * one.decode_ns + 10 * CostModel().prefill_token_ns
    assert 1e9 / one.rate == pytest.approx(alone_ns, rel=0.001)


def test_the_largest_batch_within_a_limit_is_the_last_that_holds_it() -> None:
    limit_ns = batch_point(20, CostModel(), LENGTHS, CAPACITY).tpot_ns
    found = largest_batch(CostModel(), LENGTHS, CAPACITY, limit_ns)
    assert found is not None
    assert found.num_rows == 20
    assert largest_batch(CostModel(), LENGTHS, CAPACITY, 1.0) is None
    everything = largest_batch(CostModel(), LENGTHS, CAPACITY, 1e12)
    assert everything is not None
    assert everything.num_rows == 64


def test_a_full_batch_is_bounded_by_memory() -> None:
    assert fullest_batch(CostModel(), LENGTHS, CAPACITY).num_rows == 1000 // 19, "292 positions are 19 blocks"
    assert fullest_batch(CostModel(), LENGTHS, replace(CAPACITY, num_blocks=5000)).num_rows == 64
    small = replace(CAPACITY, num_blocks=41)
    assert fullest_batch(CostModel(), LENGTHS, small).num_rows == 40 // -(-LENGTHS.mean_context // 16)


def test_the_lines_show_their_numbers() -> None:
    size = sized(SMOLLM2_135M, KvDtype.INT8, bytes_each=0.633)
    rates = speeds(size, machine())
    lines = {
        line.name: line for line in arithmetic(size, CAPACITY, LENGTHS, roofline(size, rates), rates, tpot_limit_ns=100_000_000)
    }
    assert lines["weights"].numbers == "134.5 M x 0.633 B"
    assert lines["weights"].value == "85.1 MB"
    assert lines["KV per token"].numbers == "30 x 3 x 134 B"
    assert lines["KV per token"].value == "12,060 B"
    assert lines["KV cache"].numbers.startswith("1,000 x 16 = 16,000 tokens")
    assert lines["largest batch in the limit"].value == "64 rows"
    assert "at 40.0 GB/s" in lines["reads of a decode step"].value


@pytest.mark.parametrize(
    ("value", "shown"), [(134_515_008, "135 M"), (12_060, "12.1 k"), (0.5, "0.5"), (999_999, "1000 k"), (16_000, "16.0 k")]
)
def test_numbers_in_words(value: float, shown: str) -> None:
    assert format_number(value) == shown


def test_times_in_words() -> None:
    assert [format_time(ns) for ns in (12, 1_500, 2_680_000, 3_000_000_000)] == ["12 ns", "1.50 us", "2.68 ms", "3.00 s"]
