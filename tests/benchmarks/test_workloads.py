"""The workloads over small traces of words, each word a token."""

import json

import pytest
from workloads import WORKLOADS, Source, describe, read_jobs


class Words:
    """One token per word; a cut keeps whole words."""

    def __init__(self):
        self.vocabulary = []

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        for word in text.split():
            if word not in self.vocabulary:
                self.vocabulary.append(word)
        return [self.vocabulary.index(word) for word in text.split()]

    def decode(self, token_ids, *, skip_special_tokens):
        return " ".join(self.vocabulary[token_id] for token_id in token_ids)


def words(count, prefix="w"):
    return " ".join(f"{prefix}{k}" for k in range(count))


@pytest.fixture
def source(tmp_path):
    turns = [(3, 50), (40, 15), (40, 16), (600, 300), (20, 2030), (20, 2028), *[(10, 500)] * 6]
    rows = [{"conversations": [{"value": words(p, f"p{k}-")}, {"value": words(r, f"r{k}-")}]} for k, (p, r) in enumerate(turns)]
    rows.insert(0, {"conversations": [{"value": "alone"}]})
    (tmp_path / "sharegpt_1000.jsonl").write_text("\n".join(map(json.dumps, rows)))
    csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"t,{400 + 4 * k},{2 + 4 * k}\n" for k in range(10))
    (tmp_path / "azure_conv_2023.csv").write_text(csv)
    return Source(tmp_path, Words())


def test_sharegpt_leaves_out_what_is_too_short_or_too_long_and_cuts_the_rest(source):
    lengths = [(job.num_prompt_tokens, job.max_tokens) for job in read_jobs("sharegpt", source, 4)]
    assert lengths == [(40, 16), (512, 200), (20, 200), (10, 200)]


def test_azure_draws_evenly_and_divides_by_four(source):
    lengths = [(job.num_prompt_tokens, job.max_tokens) for job in read_jobs("azure", source, 5)]
    assert lengths == [(100, 1), (102, 2), (104, 4), (106, 6), (108, 8)]


def test_short_is_32_in_and_32_out(source):
    assert describe(read_jobs("short", source, 10)) == {"requests": 10, "prompt_tokens": 320, "reply_tokens": 320}


@pytest.mark.parametrize("name", ["azure", "short"])
def test_no_two_prompts_share_their_text(source, name):
    used = [word for job in read_jobs(name, source, 10) for word in job.prompt.split()]
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload_is_the_same_each_time(source, name):
    assert read_jobs(name, source, 4) == read_jobs(name, source, 4)


def test_count_is_that_of_the_text_that_is_sent(source):
    class Merging(Words):
        """Two words that meet at a cut become one token more."""

        def encode(self, text, *, add_special_tokens):
            return super().encode(text + (" extra" if text.count(" ") == 511 else ""), add_special_tokens=add_special_tokens)

    merging = Source(source.traces, Merging())
    job = read_jobs("sharegpt", merging, 2)[1]
    assert job.num_prompt_tokens == len(job.prompt.split()) == 511


def test_too_short_trace_and_unknown_name_are_errors(source):
    with pytest.raises(ValueError, match="only 9 of 99"):
        read_jobs("sharegpt", source, 99)
    with pytest.raises(ValueError, match="there are sharegpt, azure, short"):
        read_jobs("long", source, 1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_missing_trace_is_an_error_that_says_how_to_get_it(tmp_path, name):
    with pytest.raises(SystemExit, match=r"is missing.*--traces.*ShareGPT_V3.*AzurePublicDataset"):
        read_jobs(name, Source(tmp_path, Words()), 1)
