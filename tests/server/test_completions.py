"""`/v1/completions`: what comes back for what was asked."""

import re
from dataclasses import replace

import pytest

from penstock.testing import HashExecutor
from support.server.completions import TOKENIZER, URL, ask, ask_streaming, events, oracle
from support.server.harness import CAPACITY, END_ID, PRINTABLE_MODEL, make_client, make_runtime
from support.server.tools import says


async def test_text_is_what_the_model_generates(client):
    answer = await ask(client, prompt="Hello", temperature=0)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "toy"
    assert answer["id"] == "cmpl-id1"
    [choice] = answer["choices"]
    assert choice == {
        "index": 0,
        "text": oracle("Hello"),
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 16,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_streamed_text_equals_the_whole(client):
    chunks, is_done = await ask_streaming(client, prompt="Hello", temperature=0, max_tokens=40)
    assert is_done
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == oracle("Hello", max_tokens=40)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert {chunk["id"] for chunk in chunks} == {"cmpl-id1"}


async def test_second_ask_hits_the_prefix_cache_and_usage_says_so(client):
    prompt = "x" * 100
    first = await ask(client, prompt=prompt, max_tokens=1)
    second = await ask(client, prompt=prompt, max_tokens=1)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 99


async def test_another_cache_salt_shares_nothing(client):
    prompt = "x" * 100
    await ask(client, prompt=prompt, max_tokens=1, cache_salt="a")
    other = await ask(client, prompt=prompt, max_tokens=1, cache_salt="b")
    same = await ask(client, prompt=prompt, max_tokens=1, cache_salt="a")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert same["usage"]["prompt_tokens_details"]["cached_tokens"] == 99


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_prompts_and_choices_come_in_order(client, is_streamed):
    body = {"prompt": ["one", "two"], "n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 5}
    if is_streamed:
        chunks, _ = await ask_streaming(client, **body)
        texts = [""] * 4
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        answer = await ask(client, **body)
        texts = [choice["text"] for choice in answer["choices"]]
        assert answer["usage"]["prompt_tokens"] == 6
        assert answer["usage"]["completion_tokens"] == 20
    assert texts == [oracle(prompt, temperature=1.0, seed=seed, max_tokens=5) for prompt in ("one", "two") for seed in (3, 4)]


async def test_token_ids_in_are_the_same_as_text_in(client):
    token_ids = TOKENIZER.encode("Hello", add_special_tokens=True)
    from_text = await ask(client, prompt="Hello", temperature=0)
    from_ids = await ask(client, prompt=token_ids, temperature=0)
    from_lists = await ask(client, prompt=[token_ids, token_ids], temperature=0)
    assert from_ids["choices"][0]["text"] == from_text["choices"][0]["text"]
    assert [choice["text"] for choice in from_lists["choices"]] == [from_text["choices"][0]["text"]] * 2


async def test_seed_makes_answers_repeat_and_negative_seeds_work(client):
    body = {"prompt": "Hello", "temperature": 1.0, "seed": -5}
    first, second = await ask(client, **body), await ask(client, **body)
    assert first["choices"] == second["choices"]
    assert first["choices"][0]["text"] == oracle("Hello", temperature=1.0, seed=2**64 - 5)


async def test_equal_prompts_without_a_seed_get_different_answers(runtime, client):
    seeds = iter([1, 2])
    runtime.sources = replace(runtime.sources, draw_seed=lambda: next(seeds))
    answer = await ask(client, prompt=["Hello", "Hello"], temperature=1.0)
    assert [choice["text"] for choice in answer["choices"]] == [oracle("Hello", temperature=1.0, seed=seed) for seed in (1, 2)]


async def test_without_a_seed_the_source_draws_one(client):
    answer = await ask(client, prompt="Hello", temperature=1.0)
    assert answer["choices"][0]["text"] == oracle("Hello", temperature=1.0, seed=7)


@pytest.mark.parametrize("includes_it", [False, True])
async def test_stop_string_ends_the_text(client, includes_it):
    whole = oracle("Hello", max_tokens=60)
    stop = whole[20:23]
    answer = await ask(client, prompt="Hello", temperature=0, max_tokens=60, stop=stop, include_stop_str_in_output=includes_it)
    [choice] = answer["choices"]
    end = whole.index(stop)
    assert choice["text"] == whole[: end + 3 * includes_it]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert answer["usage"]["completion_tokens"] == end + 3


async def test_stop_token_ends_the_text_and_is_not_shown(client):
    whole = oracle("Hello", max_tokens=60)
    token_id = TOKENIZER.encode(whole[10], add_special_tokens=False)[0]
    answer = await ask(client, prompt="Hello", temperature=0, max_tokens=60, stop_token_ids=[token_id])
    [choice] = answer["choices"]
    assert choice["text"] == whole[: whole.index(whole[10])]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token_id)


@pytest.mark.parametrize(
    ("fields", "text", "offsets"),
    [
        ({}, "ab", [0, 1, 1, 2]),
        ({"include_stop_str_in_output": True}, "ab<|turn|>", [0, 1, 1, 2]),
        ({"min_tokens": 4}, "ab<|turn|>c", [0, 1, 1, 2, 10, 11]),
        ({"skip_special_tokens": False}, "a<|begin|>b", [0, 1, 10, 11]),
    ],
)
async def test_a_stop_string_may_name_a_special_token(fields, text, offsets):
    runtime = says("a<|begin|>b<|turn|>c<|turn|>d")
    async with make_client(runtime) as client:
        answer = await ask(client, prompt="Hello", stop=["<|turn|>"], logprobs=0, **fields)
    runtime.close()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", "<|turn|>")
    assert choice["logprobs"]["text_offset"] == offsets


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_models_own_end_is_no_stop_reason(is_streamed):
    model = replace(PRINTABLE_MODEL, eos_token_id=END_ID, eos_period=4)
    runtime = make_runtime(HashExecutor(CAPACITY, model=model))
    async with make_client(runtime) as client:
        body = {"prompt": "Hello", "max_tokens": 500}
        if is_streamed:
            chunks, _ = await ask_streaming(client, **body)
            choice = chunks[-1]["choices"][0]
        else:
            [choice] = (await ask(client, **body))["choices"]
            [named] = (await ask(client, **body, stop_token_ids=[END_ID]))["choices"]
            assert (named["finish_reason"], named["stop_reason"]) == ("stop", END_ID)
    runtime.close()
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert "<|end|>" not in choice["text"]


async def test_echo_puts_the_prompt_before_each_choice(client):
    answer = await ask(client, prompt=["ab", "c"], temperature=0, echo=True, max_tokens=3)
    assert [choice["text"] for choice in answer["choices"]] == [
        "ab" + oracle("ab", max_tokens=3),
        "c" + oracle("c", max_tokens=3),
    ]
    chunks, _ = await ask_streaming(client, prompt="ab", temperature=0, echo=True, max_tokens=3)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab" + oracle("ab", max_tokens=3)


async def test_echo_of_truncated_or_token_prompts_is_what_the_model_saw(client):
    answer = await ask(client, prompt="abcdef", truncate_prompt_tokens=2, temperature=0, echo=True, max_tokens=1)
    assert answer["choices"][0]["text"] == "ef" + oracle("ef", max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 2
    token_ids = TOKENIZER.encode("xy", add_special_tokens=False)
    answer = await ask(client, prompt=token_ids, temperature=0, echo=True, max_tokens=1)
    assert answer["choices"][0]["text"] == "xy" + oracle("xy", max_tokens=1)


async def test_truncation_to_what_fits_leaves_room_for_the_answer(client):
    answer = await ask(client, prompt="y" * 5000, truncate_prompt_tokens=-1, max_tokens=100)
    assert answer["usage"]["prompt_tokens"] == 2048 - 100


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_logprobs_line_up_with_tokens_and_text(client, is_streamed):
    body = {"prompt": "Hello", "temperature": 0, "max_tokens": 6, "logprobs": 2}
    if is_streamed:
        chunks, _ = await ask_streaming(client, **body)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        logprobs = {key: [value for part in parts for value in part[key]] for key in parts[0]}
    else:
        logprobs = (await ask(client, **body))["choices"][0]["logprobs"]
    text = oracle("Hello", max_tokens=6)
    assert logprobs["tokens"] == list(text)
    assert logprobs["text_offset"] == list(range(6))
    assert logprobs["token_logprobs"] == pytest.approx([-0.6931] * 6, abs=1e-4)
    assert all(len(top) == 2 and token in top for top, token in zip(logprobs["top_logprobs"], text, strict=True))


async def test_logprobs_zero_gives_the_sampled_tokens_only(client):
    answer = await ask(client, prompt="Hello", temperature=0, max_tokens=3, logprobs=0)
    assert [list(top) for top in answer["choices"][0]["logprobs"]["top_logprobs"]] == [
        [token] for token in oracle("Hello", max_tokens=3)
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_token_ids_come_back_when_asked_for(client, is_streamed):
    body = {"prompt": "Hello", "temperature": 0, "max_tokens": 5, "return_token_ids": True}
    expected = TOKENIZER.encode(oracle("Hello", max_tokens=5), add_special_tokens=False)
    if is_streamed:
        chunks, _ = await ask_streaming(client, **body)
        assert [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]] == expected
    else:
        [choice] = (await ask(client, **body))["choices"]
        assert choice["token_ids"] == expected
        assert choice["prompt_token_ids"] == TOKENIZER.encode("Hello", add_special_tokens=True)


async def test_stream_ends_with_usage_when_asked_for(client):
    chunks, _ = await ask_streaming(client, prompt="Hello", max_tokens=3, stream_options={"include_usage": True})
    *pieces, last = chunks
    assert all(piece["usage"] is None for piece in pieces)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (5, 3)


async def test_continuous_usage_counts_up(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks, _ = await ask_streaming(client, prompt="Hello", max_tokens=3, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3


@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/v1/completions", {"prompt": "Hello", "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
async def test_continuous_usage_is_in_the_first_event_too(client, path, question):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**question, "max_tokens": 2, "stream": True, "stream_options": options}
    (first, *_, last), is_done = events((await client.post(path, json=body)).text)
    assert is_done
    assert first["usage"]["completion_tokens"] == 0
    assert first["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]


async def test_server_timing_tells_where_the_time_went(client):
    response = await client.post(URL, json={"prompt": "Hello"})
    names = [part.split(";dur=")[0] for part in response.headers["server-timing"].split(", ")]
    assert names == ["queue", "prefill", "decode"]
    assert all(float(part.split(";dur=")[1]) >= 0 for part in response.headers["server-timing"].split(", "))


async def test_a_stream_tells_in_a_comment_what_its_headers_came_too_early_for(client):
    response = await client.post(URL, json={"prompt": "Hello", "max_tokens": 2, "stream": True})
    assert "server-timing" not in response.headers
    keepalive, timing, *_ = response.text.split("\n\n")
    assert keepalive == ": keepalive"
    assert re.fullmatch(r": server-timing queue;dur=[0-9.]+, prefill;dur=[0-9.]+", timing)


async def test_null_fields_are_the_same_as_absent_ones(client):
    fields = ["n", "stop", "logprobs", "temperature", "seed", "suffix", "best_of", "logit_bias", "stream_options", "user"]
    answer = await ask(client, prompt="Hello", **dict.fromkeys(fields))
    assert answer["choices"][0]["text"] == oracle("Hello", temperature=1.0)


async def test_long_prompts_are_tokenised_off_the_loop(client, monkeypatch):
    import threading

    from penstock.text.tokenizer import Tokenizer

    threads = []
    encode = Tokenizer.encode

    def spying_encode(self, text, **options):
        threads.append(threading.current_thread())
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", spying_encode)
    await ask(client, prompt="z" * 5000, truncate_prompt_tokens=10)
    await ask(client, prompt="z")
    assert threads[0] is not threading.main_thread()
    assert threads[1] is threading.main_thread()


async def test_a_stream_tells_the_prompts_tokens_once(client):
    body = {"prompt": ["Hello", "you"], "max_tokens": 3, "return_token_ids": True, "stream": True, "temperature": 0}
    sent, _ = events((await client.post(URL, json=body)).text)
    for index, text in enumerate(body["prompt"]):
        told = [e["choices"][0].get("prompt_token_ids") for e in sent if e["choices"][0]["index"] == index]
        assert told == [TOKENIZER.encode(text, add_special_tokens=True)] + [None] * (len(told) - 1)


@pytest.mark.parametrize("url", [URL, "/v1/chat/completions"])
async def test_truncation_to_what_fits_leaves_room_for_the_default(client, url):
    text = "y" * 5000
    body = {"prompt": text} if url == URL else {"messages": [{"role": "user", "content": text}]}
    response = await client.post(url, json=body | {"truncate_prompt_tokens": -1})
    assert response.json()["usage"]["prompt_tokens"] == CAPACITY.max_model_len - 16
    assert response.json()["usage"]["completion_tokens"] == 16


async def test_cached_tokens_are_those_of_each_prompts_first_choice(client):
    text = "one prompt of more than two blocks, for all"
    for num_cached in (0, 42):
        for n in (1, 4):
            answer = await ask(client, prompt=text, n=n, max_tokens=1, cache_salt=f"salt {n}")
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == num_cached
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(text), n)
