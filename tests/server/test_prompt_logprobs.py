"""Log-probabilities of prompts: vLLM's `prompt_logprobs`, OpenAI's `echo` with `logprobs`, and `max_tokens: 0`."""

import math

import pytest

from penstock.calls import prompts
from penstock.serve.logprobs import CompletionLogprobs, prompt_logprobs
from penstock.testing.hash_executor import expected_prompt_logprobs
from penstock.types.result import TokenLogprobs
from support.server.completions import TOKENIZER, ask, ask_streaming, oracle
from support.server.harness import PRINTABLE_MODEL, make_tokenizer

CHAT_URL = "/v1/chat/completions"
PROMPT = "a prompt of more than twenty tokens"


def scores(token_ids, num_top):
    return expected_prompt_logprobs(token_ids, num_top, model=PRINTABLE_MODEL)


def in_vllms_words(token_ids, num_top):
    """By the definition in vLLM's protocol: the token's own and the likeliest, by id."""
    told = [None]
    for entry in scores(token_ids, num_top):
        places = {
            token_id: {"logprob": logprob, "rank": rank, "decoded_token": TOKENIZER.token_text(token_id)}
            for rank, (token_id, logprob) in enumerate(entry.top, 1)
        }
        own = {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": TOKENIZER.token_text(entry.token_id)}
        told.append({str(token_id): place for token_id, place in (places | {entry.token_id: own}).items()})
    return told


@pytest.mark.parametrize("num_top", [0, 3, 20])
async def test_prompt_logprobs_are_told_of_each_token(client, num_top):
    answer = await ask(client, prompt=PROMPT, temperature=0, prompt_logprobs=num_top)
    [choice] = answer["choices"]
    assert choice["text"] == oracle(PROMPT)
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == in_vllms_words(TOKENIZER.encode(PROMPT, add_special_tokens=True), num_top)


async def test_nobody_is_told_who_did_not_ask(client):
    answer = await ask(client, prompt=PROMPT)
    assert "prompt_logprobs" not in answer["choices"][0]


async def test_a_chat_tells_of_the_whole_prompt(client):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}
    response = await client.post(CHAT_URL, json=body)
    answer = response.json()
    assert response.status_code == 200
    assert answer["prompt_logprobs"] == in_vllms_words(answer["prompt_token_ids"], 1)


async def test_choices_and_prompts_have_their_own(client):
    answer = await ask(client, prompt=["one", "other"], n=2, seed=3, max_tokens=3, prompt_logprobs=1)
    told = [choice["prompt_logprobs"] for choice in answer["choices"]]
    expected = [in_vllms_words(TOKENIZER.encode(prompt, add_special_tokens=True), 1) for prompt in ("one", "other")]
    assert told == [expected[0], expected[0], expected[1], expected[1]]


async def test_beams_tell_of_their_prompt(client):
    answer = await ask(client, prompt=PROMPT, n=3, use_beam_search=True, max_tokens=3, prompt_logprobs=0)
    expected = in_vllms_words(TOKENIZER.encode(PROMPT, add_special_tokens=True), 0)
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [expected] * 3


def check_echo(logprobs, text, prompt, num_tokens):
    token_ids = TOKENIZER.encode(prompt, add_special_tokens=True)
    entries = scores(token_ids, 2)
    assert len(logprobs["tokens"]) == len(token_ids) + num_tokens
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["text_offset"] == list(range(len(text)))
    assert logprobs["token_logprobs"][: len(token_ids)] == [None, *[entry.logprob for entry in entries]]
    assert logprobs["top_logprobs"][0] is None
    for entry, top in zip(entries, logprobs["top_logprobs"][1:], strict=False):
        pairs = [*entry.top, (entry.token_id, entry.logprob)]
        assert top == {TOKENIZER.token_text(token_id): logprob for token_id, logprob in reversed(pairs)}


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_an_echo_with_logprobs_begins_with_those_of_the_prompt(client, max_tokens):
    answer = await ask(client, prompt=PROMPT, temperature=0, echo=True, logprobs=2, max_tokens=max_tokens, seed=1234)
    [choice] = answer["choices"]
    text = PROMPT + (oracle(PROMPT, max_tokens=max_tokens) if max_tokens else "")
    assert choice["text"] == text
    assert choice["finish_reason"] == "length"
    check_echo(choice["logprobs"], text, PROMPT, max_tokens)
    assert answer["usage"]["completion_tokens"] == max_tokens


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_a_stream_echoes_each_prompt_with_its_logprobs(client, max_tokens):
    body = {"echo": True, "logprobs": 2, "temperature": 0, "max_tokens": max_tokens}
    chunks, is_done = await ask_streaming(client, prompt=[PROMPT, "short"], n=2, **body)
    assert is_done
    for index in range(4):
        prompt = (PROMPT, "short")[index // 2]
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        text = "".join(choice["text"] for choice in choices)
        assert text == prompt + (oracle(prompt, max_tokens=max_tokens) if max_tokens else "")
        parts = [choice["logprobs"] for choice in choices]
        check_echo({name: [value for part in parts for value in part[name]] for name in parts[0]}, text, prompt, max_tokens)


async def test_both_at_once_have_as_many_alternatives_as_each_asked_for(client):
    answer = await ask(client, prompt=PROMPT, echo=True, logprobs=2, prompt_logprobs=5, max_tokens=0)
    [choice] = answer["choices"]
    token_ids = TOKENIZER.encode(PROMPT, add_special_tokens=True)
    check_echo(choice["logprobs"], PROMPT, PROMPT, 0)
    assert choice["prompt_logprobs"] == in_vllms_words(token_ids, 5)


@pytest.mark.parametrize(
    ("text", "offsets"), [("abc", [0, 0, 1, 2, 3]), ("<|turn|>c", [0, 0, 8, 9]), ("<|begin|>c<|end|>", [0, 0, 9, 10, 17])]
)
def test_offsets_do_not_count_what_the_text_does_not_have(text, offsets):
    """The tokens that the model wants around every text are scored, and are no part of the echo."""
    tokenizer = make_tokenizer(has_ends=True)
    token_ids = tokenizer.encode(text, add_special_tokens=True)
    writer = CompletionLogprobs(tokenizer, tokenizer.bytes_without_special)
    told = writer.write_prompt(token_ids, scores(token_ids, 0), 0, text)
    assert (told["tokens"][0], told["tokens"][-1]) == ("<|begin|>", "<|end|>")
    assert told["text_offset"] == offsets
    assert writer.write([TokenLogprobs(token_ids[1], -1.0, 1, ())])["text_offset"] == [len(text)]


@pytest.mark.parametrize("skips", [True, False])
async def test_offsets_of_an_echo_of_tokens_follow_its_special_tokens(client, skips):
    token_ids = TOKENIZER.encode("<|turn|>ab<|end|>c<|turn|>", add_special_tokens=False)
    body = {"prompt": token_ids, "echo": True, "logprobs": 0, "max_tokens": 1, "skip_special_tokens": skips}
    [choice] = (await ask(client, **body))["choices"]
    assert choice["text"][:-1] == ("abc" if skips else "<|turn|>ab<|end|>c<|turn|>")
    assert choice["logprobs"]["text_offset"] == ([0, 0, 1, 2, 2, 3, 3] if skips else [0, 8, 9, 10, 17, 18, 26])


def test_a_prompt_that_ends_within_a_character_moves_no_offset():
    token_ids = TOKENIZER.encode("aé", add_special_tokens=False)
    prompt, text = token_ids[:-1], TOKENIZER.decode(token_ids[:-1])
    writer = CompletionLogprobs(TOKENIZER, TOKENIZER.bytes_without_special)
    assert writer.write_prompt(prompt, scores(prompt, 0), 0, text)["text_offset"] == [0, 1]
    told = writer.write([TokenLogprobs(token_id, -1.0, 1, ()) for token_id in (token_ids[-1], token_ids[0])])
    assert told["text_offset"] == [2, 3]


async def test_the_prefix_cache_changes_nothing(client):
    plain = {"prompt": PROMPT * 3, "max_tokens": 1}
    await ask(client, **plain)
    first = await ask(client, **plain, prompt_logprobs=1)
    hit = await ask(client, **plain)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) * 3 - 1
    token_ids = TOKENIZER.encode(PROMPT * 3, add_special_tokens=True)
    assert first["choices"][0]["prompt_logprobs"] == in_vllms_words(token_ids, 1)


async def test_no_tokens_are_an_empty_answer(client):
    answer = await ask(client, prompt=PROMPT, max_tokens=0, return_token_ids=True)
    [choice] = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [], "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == len(PROMPT)


async def test_a_stop_token_does_not_end_an_empty_answer(client):
    token_ids = TOKENIZER.encode(PROMPT, add_special_tokens=True)
    [first] = (await ask(client, prompt=token_ids, temperature=0, max_tokens=1, return_token_ids=True))["choices"]
    answer = await ask(client, prompt=token_ids, temperature=0, max_tokens=0, stop_token_ids=first["token_ids"])
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["stop_reason"] is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
async def test_what_can_not_be_is_refused_by_name(client, body, param):
    response = await client.post("/v1/completions", json={"prompt": "a"} | body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_an_answer_tells_of_so_many_tokens_at_most(client, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_SCORED", 2 * len(PROMPT))
    await ask(client, prompt=PROMPT, prompt_logprobs=1, max_tokens=0)
    response = await client.post("/v1/completions", json={"prompt": PROMPT, "prompt_logprobs": 2})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("fields", [{}, {"use_beam_search": True}])
async def test_each_choice_counts_as_it_shows_its_prompt(client, monkeypatch, fields):
    monkeypatch.setattr(prompts, "MAX_SCORED", 4 * len(PROMPT))
    body = {"prompt": PROMPT, "prompt_logprobs": 1, "max_tokens": 1, **fields}
    await ask(client, **body, n=2)
    response = await client.post("/v1/completions", json=body | {"n": 3})
    assert response.status_code == 400
    assert "in 3 choices" in response.json()["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 1, "max_tokens": 1, "n": 3}
    assert (await client.post(CHAT_URL, json=chat)).status_code == 200, "a chat shows its prompt once"


async def test_a_stream_which_the_event_loop_writes_tells_of_fewer(client):
    long = {"prompt": "a" * 1000, "echo": True, "logprobs": 20, "max_tokens": 1}
    assert (await client.post("/v1/completions", json=long)).status_code == 200
    response = await client.post("/v1/completions", json=long | {"stream": True})
    assert response.status_code == 400
    assert "do not stream" in response.json()["error"]["message"]


def test_an_impossible_token_has_a_number():
    told = prompt_logprobs(TOKENIZER, [TokenLogprobs(70, -math.inf, 1, ())], 1)
    assert told[1]["70"]["logprob"] == -9999.0
