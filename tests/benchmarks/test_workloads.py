"""The workloads over small traces of words, each word a token."""

import hashlib
import json

import pytest
from workloads import DEFAULT_TRACES, WORKLOADS, Source, read_jobs, read_tokenizer

from penstock.models.cache import default_cache_dir
from penstock.models.catalog import resolve

WITH_WORDS = {
    "sharegpt": "48af8b3c5d4e9479d23fa1e9099aaeda91bd48f8b5ab1ad3bf104696a7c87a5c",
    "azure": "faf1233c4df9e20da6fe0def1335f2961581043e5c32c3db1bc2c0b31ecb3073",
    "short": "0d9aaf2676cefe0e505cd8aa38808aa19cca1b6e0b2b492c7e9e4e1c7ce72f4e",
    "long": "f6907798047c3619628508a495019bc10da1b47ea932402ebaac5d10a55f52d8",
}
WITH_SMOLLM2 = {
    "sharegpt": "518ac09ebfb33e6ba683ef68dd25e79854cd6bda3337ef59424ec202441e5dd6",
    "azure": "82fd1fb9a5d4b5c4c7810ca6e2f394bd730b4ed7f4de32b052700e1d9628a70a",
    "short": "544ec6b1de02e60bf5816a9e3af55fb62a1eb5c8b6561625a1f18d305911fbf3",
    "long": "861b3113c003dea54c34ea4def71801506430e2e67f8d8a3d90834536a865bc7",
}
"""Name of a workload -> SHA-256 of its first 50 jobs, as they were when it was first measured."""


class Words:
    """One token per word; a cut keeps whole words."""

    def __init__(self):
        self.vocabulary = {}

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [self.vocabulary.setdefault(word, len(self.vocabulary)) for word in text.split()]

    def decode(self, token_ids, *, skip_special_tokens):
        words = list(self.vocabulary)
        return " ".join(words[token_id] for token_id in token_ids)


def digest_of(jobs):
    return hashlib.sha256(
        json.dumps([[job.prompt, job.num_prompt_tokens, job.num_output_tokens] for job in jobs]).encode()
    ).hexdigest()


def words(count, prefix="w"):
    return " ".join(f"{prefix}{k}" for k in range(count))


def said(*texts):
    return [{"from": who, "value": text} for who, text in zip(("human", "gpt"), texts, strict=False)]


@pytest.fixture
def source(tmp_path):
    turns = [(3, 50), (40, 15), (40, 16), (600, 300), (20, 2030), (20, 2028), *[(10, 500)] * 6]
    rows = [{"conversations": said(words(p, f"p{k}-"), words(r, f"r{k}-"))} for k, (p, r) in enumerate(turns)]
    rows.insert(0, {"conversations": said("alone")})
    (tmp_path / "sharegpt_1000.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = [f"2023-11-16 18:15:{k:02d},{400 + 4 * k},{2 + 4 * k}\n" for k in range(10)]
    (tmp_path / "azure_conv_2023.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    return Source(tmp_path, Words())


def test_sharegpt_leaves_out_what_is_too_short_or_too_long_and_cuts_the_rest(source):
    lengths = [(job.num_prompt_tokens, job.num_output_tokens) for job in read_jobs("sharegpt", source, 4)]
    assert lengths == [(40, 16), (512, 200), (20, 200), (10, 200)]


def test_azure_draws_evenly_and_divides_by_four(source):
    lengths = [(job.num_prompt_tokens, job.num_output_tokens) for job in read_jobs("azure", source, 5)]
    assert lengths == [(100, 1), (102, 2), (104, 4), (106, 6), (108, 8)]


@pytest.mark.parametrize(("name", "num_in", "num_out"), [("short", 32, 32), ("long", 1500, 16)])
def test_all_prompts_and_replies_of_a_length_have_it(source, name, num_in, num_out):
    lengths = [(job.num_prompt_tokens, job.num_output_tokens) for job in read_jobs(name, source, 4)]
    assert lengths == [(num_in, num_out)] * 4


@pytest.mark.parametrize("name", ["azure", "short", "long"])
def test_no_two_prompts_share_their_text(source, name):
    used = [word for job in read_jobs(name, source, 4) for word in job.prompt.split()]
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
    with pytest.raises(ValueError, match="only 10 of 11"):
        read_jobs("azure", source, 11)
    with pytest.raises(ValueError, match="there are sharegpt, azure, short, long"):
        read_jobs("endless", source, 1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_missing_trace_is_an_error_that_says_how_to_get_it(tmp_path, name):
    with pytest.raises(SystemExit, match=r"is missing.*--traces.*ShareGPT_V3.*AzurePublicDataset"):
        read_jobs(name, Source(tmp_path, Words()), 1)


@pytest.mark.skipif(not DEFAULT_TRACES.is_dir(), reason="the public traces are not beside the checkout")
class TestWorkloadsOfTheTraces:
    """The first 50 jobs of each named workload are what all published figures were measured with."""

    @pytest.mark.parametrize(("name", "digest"), WITH_WORDS.items())
    def test_with_one_token_per_word(self, name, digest):
        assert digest_of(read_jobs(name, Source(DEFAULT_TRACES, Words()), 50)) == digest

    @pytest.mark.model
    @pytest.mark.parametrize(("name", "digest"), WITH_SMOLLM2.items())
    def test_with_the_default_model(self, name, digest):
        model = resolve("smollm2:135m", default_cache_dir())
        if not model.is_present:
            pytest.skip(f"the default model is not at {model.path}: penstock pull {model.name}")
        assert digest_of(read_jobs(name, Source(DEFAULT_TRACES, read_tokenizer(model.path)), 50)) == digest
