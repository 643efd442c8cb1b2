"""Readers of workloads: each format by its content, within limits, with errors that name file, line, cause and remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from penstock.lab import traces
from penstock.lab.arrivals import mean_rate
from penstock.lab.traces import read_conversations, read_workload
from penstock.types.errors import PenstockError

TRACES = Path(__file__).parents[3] / "shared" / "traces"

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.1805900,396,0\n"
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1030, "output_length": 6, "hash_ids": [5, 6, 7]},
    {"timestamp": 3000, "input_length": 600, "output_length": 0, "hash_ids": [5, 8]},
]
SHAREGPT = [
    {"id": "a", "conversations": [["human", "one two"], ["gpt", "three"], ["human", "four"], ["gpt", "five six seven"]]},
    {"id": "b", "conversations": [["gpt", "unasked"], ["human", "eight"], ["gpt", "nine"], ["human", "never answered"]]},
    {"id": "c", "conversations": [["human", "never answered"]]},
]


def conversations() -> list[object]:
    return [row | {"conversations": [{"from": who, "value": text} for who, text in row["conversations"]]} for row in SHAREGPT]


def json_lines(rows: Sequence[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def count_words(text: str) -> int:
    return len(text.split())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A name that says nothing of the content."""
    return tmp_path / "requests.txt"


def test_azure_counts_time_from_the_first_row(file: Path) -> None:
    file.write_text(AZURE)
    workload = read_workload(file)
    lengths = [(job.arrival_ns, job.num_prompt_tokens, job.num_output_tokens) for job in workload.jobs]
    assert lengths == [(0, 374, 44), (500_000_000, 396, 1)]
    assert workload.name == "requests.txt"


@pytest.mark.parametrize("prefix", ["\ufeff", "\n\n"], ids=["byte order mark", "empty lines"])
def test_a_csv_may_begin_as_programs_write_it(file: Path, prefix: str) -> None:
    file.write_text(prefix + AZURE.replace("\n", "\r\n"), encoding="utf-8", newline="")
    assert len(read_workload(file).jobs) == 2


@pytest.mark.parametrize("comma", [",", ", "])
def test_the_names_of_a_csvs_columns_may_be_quoted(file: Path, comma: str) -> None:
    header, *rows = AZURE.splitlines(keepends=True)
    file.write_text("".join([comma.join(f'"{name}"' for name in header.strip().split(",")), "\n", *rows]))
    assert len(read_workload(file).jobs) == 2


def test_azure_rows_out_of_order_are_put_in_order(file: Path) -> None:
    file.write_text(AZURE + "2023-11-16 18:15:45.6805900,9,9\n")
    assert [(job.arrival_ns, job.num_prompt_tokens) for job in read_workload(file).jobs] == [
        (0, 9),
        (1_000_000_000, 374),
        (1_500_000_000, 396),
    ]


def test_mooncake_keeps_the_ids_of_its_blocks(file: Path) -> None:
    file.write_text(json_lines(MOONCAKE))
    workload = read_workload(file)
    assert workload.prefix_block_tokens == 512
    assert [(job.arrival_ns, job.num_prompt_tokens, job.num_output_tokens, job.prefix) for job in workload.jobs] == [
        (0, 1030, 6, (5, 6, 7)),
        (2_000_000_000, 600, 1, (5, 8)),
    ]


def test_mooncake_without_ids_shares_nothing(file: Path) -> None:
    file.write_text(json_lines([{"timestamp": 0, "input_length": 5, "output_length": 6}]))
    assert read_workload(file).prefix_block_tokens == 0


@pytest.mark.parametrize("write", [json_lines, json.dumps], ids=["lines", "array"])
def test_sharegpt_gives_first_turns(file: Path, write: object) -> None:
    assert callable(write)
    file.write_text(write(conversations()))
    workload = read_workload(file, count_tokens=count_words)
    assert [(job.prompt, job.num_prompt_tokens, job.num_output_tokens, job.after) for job in workload.jobs] == [
        ("one two", 2, 1, None),
        ("eight", 1, 1, None),
    ]


def test_sharegpt_gives_conversations_in_which_each_turn_has_all_before_it(file: Path) -> None:
    file.write_text(json_lines(conversations()))
    workload = read_workload(file, count_tokens=count_words, max_turns=9)
    assert [(job.prompt, job.num_prompt_tokens, job.num_output_tokens, job.after) for job in workload.jobs] == [
        ("one two", 2, 1, None),
        ("four", 4, 3, 0),
        ("eight", 1, 1, None),
    ]


def test_an_array_may_be_one_line_that_is_longer_than_others_may_be(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_LINE_BYTES", 50)
    file.write_text(" \n" + json.dumps(conversations()))
    assert len(read_workload(file).jobs) == 2


def test_messages_may_be_named_as_openai_names_them(file: Path) -> None:
    file.write_text(json_lines([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]))
    assert list(read_conversations(file)) == [[("a", "b")]]


def test_lengths_of_texts_are_estimated_without_a_tokenizer_and_the_name_says_so(file: Path) -> None:
    file.write_text(json_lines([{"prompt": "x" * 40, "max_tokens": 7}, {"prompt": "y", "tenant": "t"}]))
    workload = read_workload(file)
    assert [(job.num_prompt_tokens, job.num_output_tokens, job.tenant) for job in workload.jobs] == [(10, 7, ""), (1, 128, "t")]
    assert "estimated at 4 characters per token" in workload.name
    assert "estimated" not in read_workload(file, count_tokens=count_words).name


def test_half_of_a_character_is_replaced_and_the_halves_of_one_are_joined(file: Path) -> None:
    file.write_text(json_lines([{"prompt": "cut \ud83d"}]))
    assert [job.prompt for job in read_workload(file).jobs] == ["cut \ufffd"]
    parts = [{"text": "\ude00 \ud83d"}, {"text": "\ude00"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "\ud83d."}]
    file.write_text(json_lines([{"messages": messages}]))
    assert list(read_conversations(file)) == [[("\ufffd \U0001f600", "\ufffd.")]]


def test_no_more_rows_are_read_than_asked_for(file: Path) -> None:
    file.write_text(AZURE + "a broken row\n")
    assert len(read_workload(file, max_requests=2).jobs) == 2
    with pytest.raises(PenstockError, match="line 4"):
        read_workload(file)


def test_a_conversation_ends_before_a_message_without_text(file: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "b"}}, {"type": "text", "text": "c"}]
    said = [("user", parts), ("assistant", "d"), ("user", "e"), ("assistant", None), ("tool", "f"), ("assistant", "g")]
    messages = [{"role": role, "content": content} for role, content in said]
    file.write_text(json_lines([{"messages": messages}, {"messages": messages[:1]}, {"messages": messages[2:]}]))
    assert list(read_conversations(file)) == [[("ac", "d")]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "unknown format"),
        ("a,b\n1,2\n", "unknown format.*Azure.*Mooncake.*ShareGPT.*prompt"),
        ('{"unknown": 1}\n', "unknown format"),
        ("{\n", "line 1: the line is not JSON.*one whole JSON object on each line"),
        ("[1]", "entry 1: a conversation has no list 'conversations'"),
        ("[{}", "entry 0: the file is not a JSON array"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no request in it"),
        (AZURE + "2023,1,1\n", "line 4: '2023' is not a time"),
        (AZURE + "2023-11-16 18:15:46+01:00,1,1\n", "line 4: .* is not a time like the first row's"),
        (AZURE + "2023-11-16 18:15:46,1\n", "line 4: the row has 2 fields instead of 3"),
        (AZURE + "2023-11-16 18:15:46,1,-1\n", "line 4: GeneratedTokens is -1.*Write one of 0 to"),
        (AZURE + "2023-11-16 18:15:46,1e3,1\n", "line 4: ContextTokens is '1e3', which is not a whole number"),
        (
            json_lines([MOONCAKE[0], MOONCAKE[0] | {"hash_ids": [1]}]),
            "line 2: 1 hash_ids do not name the blocks of 1030 tokens",
        ),
        (json_lines([MOONCAKE[0] | {"hash_ids": [1, 2, "3"]}]), "line 1: hash_ids is not a list of non-negative whole numbers"),
        (json_lines([MOONCAKE[0] | {"timestamp": True}]), "line 1: timestamp is true"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 1: timestamp is NaN"),
        (json_lines([MOONCAKE[0] | {"input_length": 10**9}]), "line 1: input_length is 1000000000"),
        (json_lines([{"prompt": "a"}, {"prompt": 1}]), "line 2: prompt is 1, which is not a text"),
        (json_lines([{"prompt": "a", "max_tokens": "9"}]), 'line 1: max_tokens is "9"'),
        (json_lines([{"prompt": "a", "tenant": 1}]), "line 1: tenant is not a text"),
        (json_lines([{"conversations": [{"value": "a"}]}]), 'line 1: a message is .*"from": "human"'),
        (json_lines([{"messages": [{"content": "a"}]}]), 'line 1: a message is .*"role": "user"'),
        ('{"prompt": "a"}\n' + "9" * 5000, "line 2: the line is not JSON"),
    ],
)
def test_errors_name_the_file_the_line_the_cause_and_the_remedy(file: Path, content: str, message: str) -> None:
    file.write_text(content)
    error = refusal(file)
    assert re.search(rf"(?s)requests\.txt.*{message}", str(error))
    assert error.remedy


def refusal(file: Path) -> PenstockError:
    """The error without its traceback, whose frames would leave the file to the garbage collector."""
    try:
        read_workload(file)
    except PenstockError as error:
        return error.with_traceback(None)
    pytest.fail("it was read")


@pytest.mark.parametrize(
    ("limit", "value", "text", "says"),
    [
        ("MAX_LINE_BYTES", 20, '{"prompt": "aaaaaaaaaaaaaaaaaaaa"}\n', "line 1: the line has more than 20 bytes"),
        ("MAX_LINES", 2, '{"prompt": "a"}\n' * 3, "line 3: the file has more than 2 lines"),
        ("MAX_ARRAY_BYTES", 50, json.dumps(conversations()), "one JSON array of .* at most 50.*jq -c"),
    ],
)
def test_limits_hold(limit: str, value: int, text: str, says: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, limit, value)
    file.write_text(text)
    with pytest.raises(PenstockError, match=says):
        read_workload(file)


def test_what_can_not_be_read_is_an_error(file: Path) -> None:
    with pytest.raises(PenstockError, match=r"Cannot read .*requests\.txt: No such file"):
        read_workload(file)
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(PenstockError, match="line 2: the line is not UTF-8"):
        read_workload(file)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not beside the checkout")
class TestPublicTraces:
    """The figures that their publishers, or others, have told."""

    def test_azure(self) -> None:
        workload = read_workload(TRACES / "azure_conv_2023.csv")
        shares = (0.5, 0.9, 0.99)
        prompts = [job.num_prompt_tokens for job in workload.jobs]
        answers = [job.num_output_tokens for job in workload.jobs]
        gaps = np.diff(np.sort([job.arrival_ns for job in workload.jobs]))
        assert len(workload.jobs) == 19_366
        assert np.quantile(prompts, shares, method="inverted_cdf").tolist() == [1020, 2735, 4142]
        assert np.quantile(answers, shares, method="inverted_cdf").tolist() == [129, 424, 601]
        assert mean_rate(workload) == pytest.approx(5.5, abs=0.1)
        assert gaps.std() / gaps.mean() == pytest.approx(1.09, abs=0.01)

    def test_mooncake(self) -> None:
        workload = read_workload(TRACES / "mooncake_synthetic.jsonl")
        block_tokens = workload.prefix_block_tokens
        seen: set[int] = set()
        num_found = num_begun = 0
        for job in workload.jobs:
            num_found += len(seen.intersection(job.prefix))
            num_begun += sum(1 for _ in takewhile(seen.__contains__, job.prefix[: job.num_prompt_tokens // block_tokens]))
            seen.update(job.prefix)
        assert num_found / sum(len(job.prefix) for job in workload.jobs) == pytest.approx(0.64, abs=0.0005)
        num_tokens = sum(job.num_prompt_tokens for job in workload.jobs)
        assert num_begun * block_tokens / num_tokens == pytest.approx(0.65, abs=0.02)

    def test_sharegpt(self) -> None:
        path = TRACES / "sharegpt_1000.jsonl"
        assert len(read_workload(path).jobs) == 998, "two of the 1,000 begin with an empty message"
        turns = read_workload(path, max_turns=4).jobs
        assert len(turns) > 2000
        assert all(job.after is None or job.after == idx - 1 for idx, job in enumerate(turns))


HEADER = {
    "kind": "header",
    "format": "penstock-recording",
    "version": 1,
    "recording": "a",
    "part": 0,
    "began": "2026-11-22T09:00:00+00:00",
    "block_size": 16,
    "capacity": {"num_blocks": 9, "block_size": 16, "max_rows": 4, "max_step_tokens": 64, "max_model_len": 128},
    "depth": 1,
    "model": "m",
    "machine": {},
    "config": "0",
    "settings": {},
}


def recorded(number: int, arrival: int, reason: str | None, output: int = 0, **more: object) -> list[dict[str, object]]:
    """A request and its end, if it has one."""
    begin: dict[str, object] = {
        "kind": "request",
        "id": number,
        "arrival": arrival,
        "queued": arrival,
        "prompt": 20,
        "max": 99,
        "tenant": "t",
    }
    begin["blocks"] = [1, [number + 10, 0, 0]]
    end: dict[str, object] = {
        "kind": "end",
        "id": number,
        "at": arrival + 500,
        "reason": reason,
        "first": None,
        "output": output,
    }
    end |= {"cached": 0, "preempted": 0}
    end["why"] = more.pop("why", "")
    return [begin | more, end] if reason else [begin | more]


def compact(rows: Sequence[object]) -> str:
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def test_requests_of_adapters_are_told_to_be_taken_as_the_bases(file: Path) -> None:
    rows = [*recorded(0, 1000, "stop", 7), *recorded(1, 2000, "stop", 7, adapter=3), *recorded(2, 3000, "stop", 7, adapter=4)]
    file.write_text(compact([HEADER, *rows]))
    workload = read_workload(file)
    assert workload.name == "requests.txt, 2 of adapters taken as the base's"
    assert len(workload.jobs) == 3


def test_a_recording_is_a_workload_of_what_is_known(file: Path) -> None:
    rows = [
        *recorded(1, 2000, "stop", 7, deadline=9000, priority=3),
        *recorded(0, 1000, "length", 99),
        *recorded(2, 3000, "abort", 5),
        *recorded(3, 4000, "abort", 0),
        *recorded(4, 5000, "abort", 6, why="deadline"),
        *recorded(5, 6000, "rejected"),
        *recorded(6, 7000, "error", 3),
        *recorded(7, 8000, None),
        *recorded(8, 9000, "stop", 5, beams=2),
        *recorded(9, 9500, "stop", 5, background=True),
    ]
    file.write_text(compact([HEADER, *rows]))
    workload = read_workload(file)
    assert workload.name == "requests.txt without 1 background request and 4 requests of unknown answer"
    assert workload.prefix_block_tokens == 16
    told = [
        (job.arrival_ns, job.num_output_tokens, job.cancelled_after_tokens, job.cancelled_ns, job.deadline_ns)
        for job in workload.jobs
    ]
    assert told == [
        (0, 99, None, None, None),
        (1000, 7, None, None, 8000),
        (2000, 6, 5, None, None),
        (3000, 1, None, 3500, None),
        (4000, 7, None, None, None),
    ]
    assert [job.prefix for job in workload.jobs] == [(1, 10), (1, 11), (1, 12), (1, 13), (1, 14)]
    assert {(job.num_prompt_tokens, job.tenant) for job in workload.jobs} == {(20, "t")}
    assert workload.jobs[1].priority == 3
    assert [job.arrival_ns for job in read_workload(file, max_requests=4).jobs] == [0, 1000, 2000, 3000]


def test_a_recorded_conversation_keeps_the_blocks_of_its_answers(file: Path) -> None:
    first, end = recorded(0, 1000, "stop", 30)
    second, other_end = recorded(1, 2000, "stop", 7, prompt=60, blocks=[1, 2, 3, [5, 4, 2]])
    file.write_text(compact([HEADER, first, end | {"blocks": [2, 3, 4]}, second, other_end | {"cached": 48}]))
    workload = read_workload(file)
    assert [(job.prefix, job.alike, job.answer) for job in workload.jobs] == [
        ((1, 10), (), (2, 3, 4)),
        ((1, 2, 3, 5), ((5, 4, 2),), ()),
    ]
    assert workload.name == "requests.txt, 60.0% of prompt tokens cached when recorded"


def test_a_recording_of_another_version_is_an_error_that_says_so(file: Path) -> None:
    file.write_text(compact([HEADER | {"version": 2}]))
    with pytest.raises(PenstockError, match=r"requests\.txt is a recording of version 2"):
        read_workload(file)
