"""The least work of all requests of a workload is that of the steps that can't be avoided."""

import pytest
from gpu_shapes import SHAPES
from gpu_work import ModelWork
from step_shape import StepShape, parse_step

from penstock.models.formats import WeightFormat

LENGTHS = [(7, 3), (1, 1), (20, 5)]


@pytest.mark.parametrize("fmt", [WeightFormat.BF16, WeightFormat.Q4_0])
def test_one_row_at_a_time_it_is_that_of_prompts_and_then_of_each_token_but_the_last(fmt):
    model = ModelWork(SHAPES["tiny"], fmt)
    steps = [StepShape(1, prompt, 0) for prompt, _ in LENGTHS]
    steps += [StepShape(1, 1, prompt + i) for prompt, reply in LENGTHS for i in range(reply - 1)]
    works = [model.of_step(step) for step in steps]
    least = model.of_requests(LENGTHS, max_rows=1)
    assert least.operations == sum(work.operations for work in works)
    assert least.num_bytes == sum(work.num_bytes for work in works)


def test_with_more_rows_weights_are_read_less_often_but_once_for_each_token_of_the_longest_reply():
    model = ModelWork(SHAPES["tiny"], WeightFormat.BF16)
    one, three, many = (model.of_requests(LENGTHS, max_rows=rows) for rows in (1, 3, 1000))
    weights = model.of_step(StepShape(1, 1, 0)).num_bytes - model.kv_bytes_per_token
    assert one.num_bytes - three.num_bytes == (9 - 5) * weights
    assert (three, one.operations) == (many, many.operations)


def test_keys_and_values_of_a_byte_are_half_as_many_bytes():
    wide, narrow = (ModelWork(SHAPES["8b"], WeightFormat.BF16, kv_bytes=size).kv_bytes_per_token for size in (2, 1))
    assert (wide, narrow) == (131072, 65536)


def test_a_step_is_read_as_it_is_written():
    assert str(parse_step("64x1@1024")) == "64x1@1024"
