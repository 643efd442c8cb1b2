"""llama.cpp's server: `/completion`, `/infill`, `/props`, `/slots` and others, in its words, and what its clients send."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from penstock.backends.native import _native
from penstock.backends.native.executor import make_row_sampling
from penstock.backends.reference.sampling import narrow
from penstock.calls.in_flight import InFlight
from penstock.text import fim
from penstock.types.sampling import SamplingParams
from support.server.completions import TOKENIZER, oracle
from support.server.harness import (
    CAPACITY,
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    GatedExecutor,
    make_client,
    make_runtime,
    make_text_runtime,
    until,
)
from support.server.tools import says

END, BEGIN, TURN = SPECIAL_TOKENS
ASK = {"prompt": "Hi", "temperature": 0, "n_predict": 5}
HOLE = {"input_prefix": "a = ", "input_suffix": " + 1", "temperature": 0, "n_predict": 5}
TIMES = ("timings", "tokens_cached")
DEFAULTS = {
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "typical_p": 1,
    "top_n_sigma": -1,
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "repeat_last_n": 64,
    "repeat_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "mirostat": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "grammar": "",
    "n_probs": 0,
    "min_keep": 0,
    "n_keep": 0,
    "n_discard": 0,
    "n_cmpl": 1,
    "n_indent": 0,
    "n_cache_reuse": 0,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 0,
    "id_slot": -1,
    "cache_prompt": True,
    "stop": [],
    "logit_bias": [],
    "lora": [],
    "ignore_eos": False,
    "timings_per_token": False,
    "post_sampling_probs": False,
    "return_progress": False,
    "response_fields": [],
}
"""Defaults of llama.cpp's server, as clients send them."""
EDITOR = {
    "input_prefix": "def f(x):\n",
    "input_suffix": "\n    return y\n",
    "input_extra": [{"text": "y = 1", "time": [1732, 51], "filename": "b.py"}],
    "prompt": "    ",
    "n_predict": 8,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "id_slot": 0,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 60_000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_per_second", "truncated", "tokens_cached"],
}
"""The body that llama.vim sends, and llama.vscode without `response_fields`."""


def said(prompt, num_tokens=5):
    return oracle(prompt, max_tokens=num_tokens)


async def ask(client, path="/completion", **fields):
    response = await client.post(path, json=(HOLE if path == "/infill" else ASK) | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(client, path="/completion", status=400, kind="invalid_request_error", **fields):
    response = await client.post(path, json=(HOLE if path == "/infill" else ASK) | fields)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) - {"n_prompt_tokens", "n_ctx"} == {"code", "message", "type"}
    assert (error["code"], error["type"]) == (status, kind)
    return error["message"]


async def events(client, path="/completion", **fields):
    response = await client.post(path, json=(HOLE if path == "/infill" else ASK) | {"stream": True} | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n") if event.startswith("data: ")]


@pytest.fixture
def _has_fim(monkeypatch):
    """The toy's special tokens are those that ask for a middle."""
    monkeypatch.setattr(fim, "NAMES", ((BEGIN, TURN, END),))


# Completions


async def test_a_completion_is_the_same_streamed_and_whole_and_as_openais(client):
    whole = await ask(client, return_tokens=True)
    openai = {"prompt": "Hi", "temperature": 0, "max_tokens": 5, "return_token_ids": True}
    [choice] = (await client.post("/v1/completions", json=openai)).json()["choices"]
    assert (whole["content"], whole["tokens"]) == (choice["text"], choice["token_ids"])
    assert (whole["tokens_predicted"], whole["tokens_evaluated"]) == (5, 2)
    assert (whole["stop"], whole["stop_type"], whole["stopping_word"], whole["truncated"]) == (True, "limit", "", False)
    assert (whole["index"], whole["id_slot"], whole["model"], whole["prompt"]) == (0, -1, "toy", "Hi")

    *pieces, last = await events(client)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [token_id for piece in pieces for token_id in piece["tokens"]] == whole["tokens"]
    assert pieces[-1]["tokens_predicted"] == 5
    assert not any(piece["stop"] or "timings" in piece for piece in pieces)
    assert (last["content"], last["tokens"]) == ("", [])
    same = {"content", "tokens", "generation_settings", *TIMES}
    assert {name: value for name, value in last.items() if name not in same} == {
        name: value for name, value in whole.items() if name not in same
    }
    assert (await ask(client))["tokens"] == [], "they are told if that is asked for"


async def test_defaults_that_clients_send_change_nothing(client):
    plain = await ask(client)
    assert (await ask(client, **DEFAULTS))["content"] == plain["content"]
    assert (await ask(client, **dict.fromkeys(DEFAULTS)))["content"] == plain["content"]


async def test_settings_do_what_their_openai_names_do_and_are_told(client):
    settings = {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 11, "presence_penalty": 0.5}
    settings |= {"frequency_penalty": 0.25, "stop": ["zz"]}
    openai = {"prompt": "Hi", "max_tokens": 20, "repetition_penalty": 1.3, **settings}
    [choice] = (await client.post("/v1/completions", json=openai)).json()["choices"]
    answer = await ask(client, n_predict=20, repeat_penalty=1.3, **settings)
    assert answer["content"] == choice["text"]
    told = answer["generation_settings"]
    assert {name: told[name] for name in settings} == settings
    assert (told["repeat_penalty"], told["n_predict"], told["mirostat"]) == (1.3, 20, 0)
    assert (await ask(client, seed=-1))["generation_settings"]["seed"] >= 0


async def test_only_the_samplers_that_are_listed_are_applied(client):
    settings = {"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "repeat_penalty": 1.5, "seed": 3, "n_predict": 12}
    only = await ask(client, **settings, samplers=["top_k", "temperature"])
    assert only["content"] == (await ask(client, seed=3, n_predict=12, temperature=0.7, top_k=3))["content"]
    assert only["content"] == (await ask(client, **settings, samplers="kt"))["content"]
    assert only["generation_settings"]["top_p"] == 1
    none = await ask(client, **settings, samplers=[])
    assert none["content"] == (await ask(client, seed=3, n_predict=12, temperature=1))["content"]
    likeliest = await ask(client, **settings, samplers=["top_k", "infill"])
    assert likeliest["content"] == said("Hi", 12)


async def test_top_n_sigma_reaches_the_engine_by_both_spellings(client, monkeypatch):
    drawn, opens = [], InFlight.open

    def open_call(in_flight, call, requests, *rest):
        drawn.extend([request.sampling.top_n_sigma for request in requests])
        return opens(in_flight, call, requests, *rest)

    monkeypatch.setattr(InFlight, "open", open_call)
    assert (await ask(client, top_n_sigma=1.5))["generation_settings"]["top_n_sigma"] == 1.5
    assert (await client.post("/v1/completions", json={"prompt": "a", "top_n_sigma": 2})).status_code == 200
    await ask(client, top_n_sigma=1.5, samplers=["top_k"])
    assert drawn == [1.5, 2, 0]


def test_top_n_sigma_keeps_what_is_near_the_largest_logit_at_any_temperature():
    logits = np.array([5, 4, 1, 0, np.nan, -np.inf], np.float32)  # of four: mean 2.5, standard deviation 2.06
    for num_sigmas, kept in ((0.4, [0]), (0.5, [0, 1]), (2, [0, 1, 2]), (0, [0, 1, 2, 3]), (-1, [0, 1, 2, 3])):
        for temperature in (0.1, 1, 50):
            params = SamplingParams(top_n_sigma=num_sigmas, temperature=temperature)
            assert narrow(logits, params)[0].tolist() == kept
            drawn = {
                _native.sample(logits, make_row_sampling(replace(params, seed=seed)), np.zeros(1, np.int32), 1)[0]
                for seed in range(40)
            }
            assert drawn <= set(kept)
            assert drawn == set(kept) or temperature < 50


DRAWN = {"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "presence_penalty": 1, "seed": 3, "n_predict": 12}
ORDER = ["penalties", "top_n_sigma", "temperature", "top_k", "top_p", "min_p"]
OFF = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "presence_penalty": 0}


@pytest.mark.parametrize(
    ("samplers", "fields", "pair"),
    [
        (["top_p", "top_k"], {}, ("top_p", "top_k")),
        (["min_p", "top_p"], {}, ("min_p", "top_p")),
        (["top_p", "temperature"], {}, ("top_p", "temperature")),
        (["min_p", "temperature"], {}, ("min_p", "temperature")),
        (["temperature", "penalties"], {}, ("temperature", "penalties")),
        (["top_k", "penalties"], {"temperature": 0}, ("top_k", "penalties")),
        (["infill", "penalties"], {}, ("infill", "penalties")),
        (["top_k", "top_p", "temperature"], {}, ("top_p", "temperature")),
        ("pk", {}, ("top_p", "top_k")),
    ],
)
async def test_an_order_of_samplers_that_would_give_other_answers_is_refused(client, samplers, fields, pair):
    told = await refused(client, **DRAWN | fields, samplers=samplers)
    assert f"'samplers' has {pair[0]!r} before {pair[1]!r}" in told
    settings = (await ask(client, **DRAWN))["generation_settings"]
    assert ", ".join(settings["samplers"]) in told, "the error and the settings tell the same order"
    assert settings["samplers"] == ORDER


@pytest.mark.parametrize(
    ("samplers", "fields", "same"),
    [
        (["penalties", "top_k", "temperature"], {}, {"top_p": 1, "min_p": 0}),
        (["min_p", "top_k"], {}, {"presence_penalty": 0, "temperature": 1, "top_p": 1}),
        (["min_p", "top_p", "top_k", "temperature"], {"temperature": 0}, {"presence_penalty": 0}),
        (["min_p", "top_p", "top_k", "temperature"], {"top_k": 1}, {"presence_penalty": 0}),
        (["min_p", "top_p", "top_k", "temperature", "penalties"], OFF, {}),
        (["top_p", "top_k"], OFF | {"top_k": 3}, {}),
        (ORDER, {}, {}),
        (DEFAULTS["samplers"], {}, {}),
        (DEFAULTS["samplers"][1:], {}, {"presence_penalty": 0}),
        ("edskypmxt", {}, {}),
    ],
)
async def test_other_orders_are_taken_if_the_answer_is_the_same_or_it_is_llama_cpps_default(client, samplers, fields, same):
    answer = await ask(client, **DRAWN | fields, samplers=samplers)
    assert answer["content"] == (await ask(client, **DRAWN | fields | same))["content"]


async def test_an_order_is_judged_by_the_values_that_apply(client):
    """A field that is left out has the value of the model's files, which here switches it off."""
    await ask(client, samplers=["top_p", "temperature"], temperature=0.7)
    await refused(client, samplers=["top_p", "temperature"], temperature=0.7, top_p=0.9)


@pytest.mark.parametrize("seed", [16962161842275429258, 2**63, 2**64 - 2, 2**64 - 1])
async def test_a_seed_that_an_answer_tells_can_be_sent_back(client, seed):
    draw = {"temperature": 1, "n_predict": 12}
    told = await ask(client, **draw, seed=seed)
    assert told["generation_settings"]["seed"] == seed
    if seed != 2**64 - 1:  # -1 asks for one that is drawn
        negative = await ask(client, **draw, seed=seed - 2**64)
        assert (negative["content"], negative["generation_settings"]["seed"]) == (told["content"], seed)
    openai = {"prompt": "Hi", "max_tokens": 12, "temperature": 1, "seed": seed - 2**64}
    [choice] = (await client.post("/v1/completions", json=openai)).json()["choices"]
    assert told["content"] == choice["text"]


async def test_negative_temperatures_are_greedy(client):
    assert (await ask(client, temperature=-1))["content"] == said("Hi")


async def test_stops_say_which(client):
    text = said("Hi", 20)
    word = await ask(client, n_predict=20, stop=[text[3:5]])
    assert (word["content"], word["stop_type"], word["stopping_word"]) == (text[:3], "word", text[3:5])
    *_, last = await events(client, n_predict=20, stop=[text[3:5]])
    assert (last["stop_type"], last["stopping_word"]) == ("word", text[3:5])


async def test_an_answer_without_a_limit_ends_with_the_context(client):
    answer = await ask(client, n_predict=-1, stop=["no such words"])
    assert answer["tokens_predicted"] > 16
    cut = await ask(client, prompt="x" * 2040, n_predict=100)
    assert (cut["tokens_predicted"], cut["truncated"], cut["stop_type"]) == (8, True, "limit")
    whole = await ask(client, prompt="x" * 2040, n_predict=8)
    assert whole["truncated"] is False
    assert "2048" in await refused(client, prompt="x" * 2048, kind="exceed_context_size_error")


async def test_nothing_is_generated_to_fill_the_cache(client):
    prompt = "The cache holds what was computed once, in blocks of some tokens. " * 4
    answer = await ask(client, prompt=prompt, n_predict=0, samplers=[], response_fields=[""])
    assert answer == {}
    answer = await ask(client, prompt=prompt)
    assert answer["tokens_cached"] > 100
    assert answer["timings"]["cache_n"] == answer["tokens_cached"]
    assert answer["timings"]["prompt_n"] == answer["tokens_evaluated"] - answer["tokens_cached"]
    assert (await ask(client, prompt=prompt, cache_prompt=False))["tokens_cached"] == 0
    several = await ask(client, prompt=prompt[::-1], n_cmpl=3)
    assert [(one["tokens_cached"], one["timings"]["cache_n"]) for one in several] == [(0, 0)] * 3
    *pieces, last = await events(client, n_predict=0)
    assert (pieces, last["content"], last["tokens_predicted"]) == ([], "", 0)


async def test_prompts_of_texts_and_tokens(client):
    ids = TOKENIZER.encode("Hi there", add_special_tokens=False)
    for prompt in (
        ids,
        ["Hi", *ids[2:]],
        [ids[0], "i", *ids[2:]],
        {"prompt_string": "Hi there"},
        {"prompt_string": ids, "new": None},
    ):
        answer = await ask(client, prompt=prompt)
        assert (answer["content"], answer["tokens_evaluated"]) == (said("Hi there"), len(ids)), prompt
        assert answer["prompt"] == "Hi there"


async def test_several_prompts_and_choices_are_a_list(client):
    prompts = ["Hi", TOKENIZER.encode("Ho", add_special_tokens=False), [*TOKENIZER.encode("H", add_special_tokens=False), "u"]]
    answers = await ask(client, prompt=prompts, n_cmpl=2)
    texts = [text for text in ("Hi", "Ho", "Hu") for _ in range(2)]
    assert [answer["index"] for answer in answers] == list(range(6))
    assert [answer["prompt"] for answer in answers] == texts
    assert [answer["content"] for answer in answers] == [said(text) for text in texts]
    told = await events(client, prompt=prompts)
    for index, answer in enumerate(answers[::2]):
        assert "".join(event["content"] for event in told if event["index"] == index) == answer["content"]


async def test_biases_are_numbers_or_bans_of_ids_or_texts(client, monkeypatch):
    sent = []
    open_call = InFlight.open
    monkeypatch.setattr(InFlight, "open", lambda *args: sent.extend(args[2]) or open_call(*args))

    async def sampling(bias):
        await ask(client, logit_bias=bias)
        return sent[-1].sampling.logit_bias, sent[-1].sampling.banned_token_sequences

    z, y = TOKENIZER.encode("zy", add_special_tokens=False)
    for bias in ([[z, False]], {str(z): False}, [["z", False]], [["zz", False]]):
        assert await sampling(bias) == ((), ((z,),))
    assert await sampling([[z, 1.5], ["zy", -4]]) == (tuple(sorted([(z, -2.5), (y, -4.0)])), ())
    assert await sampling({"z": 60, "y": False}) == (((z, 60.0),), ((y,),))
    # Texts may share tokens: what their biases add up to stays within the bounds of one bias.
    assert await sampling([["zy", 90], ["z", 90], ["y", -190 / 2]]) == (tuple(sorted([(z, 100.0), (y, -5.0)])), ())


async def test_grammars_and_schemas_are_followed(client):
    answer = await ask(client, n_predict=50, grammar='root ::= "yes" | "no"')
    assert answer["content"] in ("yes", "no")
    assert answer["generation_settings"]["grammar"] == 'root ::= "yes" | "no"'
    schema = {"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"]}
    assert json.loads((await ask(client, n_predict=50, json_schema=schema))["content"])["age"] in (1, 2)


async def test_probabilities_are_of_the_tokens(client):
    answer = await ask(client, n_probs=3, return_tokens=True)
    told = answer["completion_probabilities"]
    assert [one["id"] for one in told] == answer["tokens"]
    assert "".join(one["token"] for one in told) == answer["content"]
    for one in told:
        assert bytes(one["bytes"]).decode() == one["token"]
        first, *rest = one["top_logprobs"]
        assert (first["id"], len(rest)) == (one["id"], 2)
    pieces = await events(client, n_probs=3)
    assert [one for piece in pieces for one in piece.get("completion_probabilities", ())] == told


async def test_timings_are_of_this_request(client):
    timings = (await ask(client))["timings"]
    assert (timings["prompt_n"], timings["predicted_n"]) == (2, 5)
    assert timings["predicted_per_second"] == pytest.approx(5000 / timings["predicted_ms"])
    assert timings["prompt_per_token_ms"] == pytest.approx(timings["prompt_ms"] / 2)
    *pieces, last = await events(client, timings_per_token=True)
    assert [piece["timings"]["predicted_n"] for piece in pieces] == [piece["tokens_predicted"] for piece in pieces]
    assert {piece["timings"]["prompt_ms"] for piece in pieces} == {last["timings"]["prompt_ms"]}
    assert pieces[-1]["timings"]["predicted_ms"] <= last["timings"]["predicted_ms"]


async def test_fields_of_an_answer_can_be_chosen(client):
    fields = ["content", "generation_settings/n_predict", "timings/nothing", "nothing"]
    assert await ask(client, response_fields=fields) == {
        "content": said("Hi"),
        "generation_settings/n_predict": 5,
    }
    *_, last = await events(client, response_fields=["stop"])
    assert last == {"stop": True}


async def test_lines_end_answers():
    runtime = says("    a = 1\n    b = 2\nc = 3\n")
    try:
        async with make_client(runtime) as client:
            answer = await ask(client, n_indent=4, n_predict=40)
            assert (answer["content"], answer["stop_type"]) == ("    a = 1\n    b = 2", "limit")
            assert answer["generation_settings"]["n_indent"] == 4
            assert (await ask(client, n_predict=40))["content"].startswith("    a = 1\n    b = 2\nc")
            late = await ask(client, t_max_predict_ms=1, n_predict=2000, ignore_eos=True)
            assert late["tokens_predicted"] < 2000
            assert "\n" in late["content"]
    finally:
        runtime.close()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"temperature": 3}, "'temperature' must be at most 2"),
        ({"n_predict": 2**40}, "'n_predict' must be at most"),
        ({"n_predict": None, "max_tokens": -3}, "'max_tokens' must be at least -2"),
        ({"n_cmpl": 0}, "'n_cmpl' must be at least 1"),
        ({"mirostat": 2}, "'mirostat' is not supported yet"),
        ({"dry_multiplier": 0.8}, "'dry_multiplier' is not supported yet"),
        ({"xtc_probability": 0.5}, "'xtc_probability' is not supported yet"),
        ({"typical_p": 0.5}, "'typical_p' is not supported yet"),
        ({"dynatemp_range": 0.5}, "'dynatemp_range' is not supported yet"),
        ({"top_n_sigma": 1001}, "'top_n_sigma' must be at most 1000"),
        ({"post_sampling_probs": True}, "'post_sampling_probs' is not supported yet"),
        ({"lora": [{"id": 0, "scale": 1}]}, "'lora' is not supported yet"),
        ({"repeat_penalty": 1.1, "repeat_last_n": -2}, "'repeat_last_n' must be at least -1"),
        ({"repeat_penalty": 1000}, "'repeat_penalty' must be at most 100"),
        ({"seed": 2**64}, "'seed' must be an integer of at most 64 bits"),
        ({"samplers": ["top_k", "top_k"]}, "'samplers' has 'top_k' twice"),
        ({"samplers": ["magic"]}, "'samplers' has 'magic'; known are penalties, top_n_sigma, temperature"),
        ({"samplers": "kz"}, "'samplers' has the letter 'z'"),
        ({"samplers": 4}, "'samplers' must be a list of names"),
        ({"n_probs": 21}, "'n_probs' must be at most 20"),
        ({"grammar": "root ::= ("}, "'grammar' is refused"),
        ({"json_schema": {"type": "nothing"}}, "'json_schema' is refused"),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, "'grammar' and 'json_schema' both say"),
        ({"grammar": 'root ::= "a"', "ignore_eos": True}, "'ignore_eos' and 'grammar' exclude each other"),
        ({"logit_bias": [[1]]}, "'logit_bias' must be a list of pairs"),
        ({"logit_bias": [[1, True]]}, "'logit_bias' must have numbers"),
        ({"logit_bias": [[10**6, 1]]}, "'logit_bias' must name tokens by ids in [0, "),
        ({"logit_bias": {"-1": 1}}, "'logit_bias' must name tokens by ids in [0, "),
        ({"max_tokens": 6}, "'n_predict' and 'max_tokens' differ"),
        ({"n_probs": 1, "logprobs": 2}, "'n_probs' and 'logprobs' differ"),
        ({"response_fields": "content"}, "'response_fields' must be a list"),
        ({"prompt": ""}, "'prompt' is empty"),
        ({"prompt": []}, "'prompt' has 0 prompts"),
        ({"prompt": ["a", []]}, "'prompt[1]' is empty"),
        ({"prompt": ["a", 5, True]}, "'prompt[2]' must be a token id or a string"),
        ({"prompt": [10**6, "a"]}, "outside the vocabulary"),
        ({"prompt": [1] + ["a"] * 1025}, "'prompt' has 1025 strings between token ids; at most 1024"),
        ({"prompt": [[1] + ["a"] * 600] * 2}, "'prompt' has 1200 strings between token ids; at most 1024"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, "'prompt.multimodal_data' is not supported yet"),
        ({"prompt": {"text": "a"}}, "Unknown parameter: 'prompt.text'"),
        ({"colour": 1}, "Unknown parameter: 'colour'"),
    ],
)
async def test_errors_name_the_field_as_the_client_calls_it(client, fields, told):
    assert told in await refused(client, **fields)


async def test_biases_are_bounded_as_each_choice_tells_them_back(client, monkeypatch):
    monkeypatch.setattr("penstock.serve.llama_cpp.read.MAX_BIASED_TOKENS", 2)
    await ask(client, logit_bias=[[5, False], [6, 1], [6, 1]])
    told = await refused(client, logit_bias={"5": False, "6": False, "7": 1})
    assert "'logit_bias' names 3 tokens; at most 2 are taken" in told


async def test_a_prompt_beyond_the_context_is_told_with_its_length(client):
    response = await client.post("/completion", json=ASK | {"prompt": "a" * 3000})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, 400, "exceed_context_size_error")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (3000, 2048)
    chat = {"messages": [{"role": "user", "content": "a" * 3000}], "max_tokens": 1}
    error = (await client.post("/v1/chat/completions", json=chat)).json()["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert (error["n_prompt_tokens"] > 3000, error["n_ctx"]) == (True, 2048)


async def test_chats_and_completions_tell_timings_where_they_are_asked_for(client):
    asked = {"timings_per_token": True, "return_progress": True, "verbose": True}
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "Hi", "max_tokens": 3})):
        whole = (await client.post(path, json=body | asked)).json()
        assert whole["timings"]["predicted_n"] == 3
        text = (await client.post(path, json=body | asked | {"stream": True})).text
        told = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if "{" in event]
        timed = [event for event in told if "timings" in event]
        assert timed[-1]["timings"] == whole["timings"] | timed[-1]["timings"]
        assert timed[-1]["timings"]["predicted_n"] == 3
        assert "timings" not in (await client.post(path, json=body)).json()


async def test_the_tokens_of_a_chat_are_counted(client):
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    tokens = (await client.post("/tokenize", json=chat)).json()["count"]
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        assert (await client.post(path, json=chat)).json() == {"object": "response.input_tokens", "input_tokens": tokens}
    assert (await client.post(path, json={})).json()["error"]["param"] == "messages"


async def test_responses_answer_without_v1(client):
    answers = [
        (await client.post(path, json={"input": "Hi", "max_output_tokens": 16, "temperature": 0})).json()
        for path in ("/v1/responses", "/responses")
    ]
    assert answers[0]["output"][0]["content"] == answers[1]["output"][0]["content"]


async def test_errors_have_llama_cpps_types(client, runtime):
    assert "'other' is not served" in await refused(client, model="other", status=404, kind="not_found_error")
    async with make_client(runtime, api_keys=("k",)) as closed:
        await refused(closed, status=401, kind="authentication_error")
    assert (await client.get("/completion")).json()["error"]["code"] == 405


@pytest.mark.parametrize("verb", ["GET", "POST"])
@pytest.mark.parametrize(("path", "told"), [("/lora-adapters", "in 'model'"), ("/slots/0", "by themselves")])
async def test_routes_that_are_not_there_say_so_in_llama_cpps_words(client, verb, path, told):
    response = await client.request(verb, path)
    error = response.json()["error"]
    assert (response.status_code, set(error)) == (404, {"code", "message", "type"})
    assert (error["code"], error["type"]) == (404, "not_found_error")
    assert error["message"].startswith(f"{verb} {path} is not supported here.")
    assert told in error["message"]


async def test_bodies_are_json_whatever_curl_calls_them(client):
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for path, body in (("/completion", ASK), ("/api/generate", {"model": "toy", "prompt": "Hi", "stream": False})):
        assert (await client.post(path, content=json.dumps(body), headers=form)).status_code == 200
        other_site = await client.post(path, content=json.dumps(body), headers=form | {"Sec-Fetch-Site": "cross-site"})
        assert other_site.status_code == 403
    assert (await client.post("/v1/completions", content=json.dumps(ASK), headers=form)).status_code == 400


async def test_unknown_fields_are_passed_over_if_the_server_says_so(runtime):
    async with make_client(runtime, ignore_unknown_parameters=True) as client:
        answer = await ask(client, colour=1)
        assert answer["content"] == said("Hi")
        assert "'mirostat' is not supported yet" in await refused(client, mirostat=2)


async def test_a_failure_within_a_stream_is_an_event(client, monkeypatch):
    monkeypatch.setattr("penstock.serve.llama_cpp.write.LlamaWriter._final", None)
    *_, last = await events(client)
    assert (last["error"]["code"], last["error"]["type"]) == (500, "server_error")


# Infill


@pytest.mark.usefixtures("_has_fim")
async def test_a_hole_is_filled(client):
    answer = await ask(client, "/infill", prompt="2")
    text = f"{BEGIN}a = 2{TURN} + 1{END}"
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert answer["content"] == said(ids)
    assert answer["tokens_evaluated"] == len(ids)
    *pieces, _ = await events(client, "/infill", prompt="2")
    assert "".join(piece["content"] for piece in pieces) == answer["content"]


@pytest.mark.usefixtures("_has_fim")
async def test_editors_are_answered(client):
    answer = await ask(client, "/infill", **EDITOR)
    assert set(answer) == set(EDITOR["response_fields"])
    assert answer["truncated"] is False
    warm = {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": [], "response_fields": [""]}
    assert await ask(client, "/infill", **EDITOR | warm) == {}


@pytest.mark.usefixtures("_has_fim")
async def test_files_stand_before_the_hole_as_far_as_there_is_room(runtime, client, monkeypatch):
    async def prompt(*files):
        return (await ask(client, "/infill", input_extra=[{"text": text, "filename": "f"} for text in files]))["prompt"]

    hole = f"{BEGIN}a = {TURN} + 1{END}"
    assert await prompt("one", "two") == f"one\n\ntwo\n\n{hole}"
    monkeypatch.setattr(fim, "FILES", ("~",))
    assert await prompt("one", "two") == f"~f\none~f\ntwo~file\n{hole}"
    monkeypatch.setattr(fim, "REPOSITORIES", ("^",))
    assert await prompt("one") == f"^repository\n~f\none~file\n{hole}"
    assert await prompt("x" * 1500, "y" * 1000, "z" * 900) == f"^repository\n~f\n{'y' * 1000}~f\n{'z' * 900}~file\n{hole}"
    assert await prompt("x" * 3000) == hole
    assert await prompt("x" * 2_000_000, "y") == f"^repository\n~f\ny~file\n{hole}"
    assert runtime.admission.lengths.prompt_tokens(400) == 100, "nothing is learned from files that may be left out"


async def test_a_model_that_fills_nothing_is_named(client):
    told = await refused(client, "/infill", status=400, kind="not_supported_error")
    assert "toy has no tokens for filling in the middle" in told


@pytest.mark.usefixtures("_has_fim")
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"input_prefix": None}, "'input_prefix' must be a string"),
        ({"input_prefix": "x" * 3000}, "maximum context length is 2048 tokens"),
        ({"prompt": [1]}, "'prompt' must be a string"),
        ({"input_extra": [{"filename": "a"}]}, "Missing required parameter: 'input_extra[0].text'"),
        ({"input_extra": [{"text": "a", "colour": 1}]}, "Unknown parameter: 'input_extra[0].colour'"),
    ],
)
async def test_errors_of_holes(client, fields, told):
    kind = "exceed_context_size_error" if "context" in told else "invalid_request_error"
    assert told in await refused(client, "/infill", kind=kind, **fields)


# Templates and tokens


async def test_a_template_makes_the_prompt_of_a_chat():
    runtime = make_runtime(chat_template=CHAT_TEMPLATE)
    try:
        async with make_client(runtime) as client:
            chat = {"messages": [{"role": "user", "content": "Hi"}]}
            prompt = (await client.post("/apply-template", json=chat)).json()["prompt"]
            assert "Hi" in prompt
            completed = await ask(client, prompt=prompt)
            chatted = (await client.post("/v1/chat/completions", json=chat | {"temperature": 0, "max_tokens": 5})).json()
            assert completed["content"] == chatted["choices"][0]["message"]["content"]
            assert completed["tokens_evaluated"] == chatted["usage"]["prompt_tokens"]
            error = (await client.post("/apply-template", json={"messages": []})).json()["error"]
            assert (error["code"], error["type"]) == (400, "invalid_request_error")
    finally:
        runtime.close()


async def test_tokens_of_a_content_and_back(client):
    text = "Hé €"
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert (await client.post("/tokenize", json={"content": text})).json() == {"tokens": ids}
    assert (await client.post("/tokenize", json={"content": ""})).json() == {"tokens": []}
    assert (await client.post("/tokenize", json={"content": [*ids[:1], "é"]})).json()["tokens"] == ids[: 1 + len("é".encode())]
    told = (await client.post("/tokenize", json={"content": text, "with_pieces": True, "add_special": False})).json()["tokens"]
    assert [one["id"] for one in told] == ids
    data = b"".join([one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in told])
    assert data.decode() == text
    assert any(isinstance(one["piece"], list) for one in told), "parts of a character are bytes"
    long = (await client.post("/tokenize", json={"content": "a" * 70_000, "with_pieces": True})).json()["error"]
    assert "'content' has 70000 tokens; one answer has the pieces of at most 65536" in long["message"]
    assert (await client.post("/detokenize", json={"tokens": ids})).json()["content"] == text


async def test_the_other_shapes_of_tokenize_are_still_there(client):
    message = {"messages": [{"role": "user", "content": "a"}]}
    assert "max_model_len" in (await client.post("/tokenize", json=message)).json()
    assert "max_model_len" in (await client.post("/tokenize", json={"prompt": "a"})).json()
    error = (await client.post("/tokenize", json={"content": "a", "parse_special": False})).json()["error"]
    assert (error["code"], "'parse_special' is not supported yet" in error["message"]) == (400, True)


# Embeddings


@pytest.fixture
async def embedder():
    runtime = make_text_runtime()
    async with make_client(runtime) as client:
        yield client
    runtime.close()


async def test_embeddings_are_those_of_openais_api(embedder):
    openai = (await embedder.post("/v1/embeddings", json={"input": ["a", "b"]})).json()["data"]
    for path in ("/embedding", "/embeddings"):
        answer = (await embedder.post(path, json={"content": ["a", "b"]})).json()
        assert answer == [{"index": one["index"], "embedding": [one["embedding"]]} for one in openai]
    [one] = (await embedder.post("/embedding", json={"content": "a"})).json()
    assert one["embedding"] == [openai[0]["embedding"]]


async def test_vectors_have_the_norm_that_is_asked_for(embedder):
    async def vector(norm):
        [one] = (await embedder.post("/embedding", json={"content": "a", "embd_normalize": norm})).json()
        return one["embedding"][0]

    plain = await vector(-1)
    for norm in (1, 2, 3):
        size = sum([abs(number) ** norm for number in plain]) ** (1 / norm)
        assert await vector(norm) == pytest.approx([number / size for number in plain], rel=1e-5)
    assert max(map(abs, await vector(0))) == pytest.approx(32760)
    error = (await embedder.post("/embedding", json={"content": "a", "embd_normalize": -2})).json()["error"]
    assert (error["code"], "'embd_normalize' must be at least -1" in error["message"]) == (400, True)
    error = (await embedder.post("/completion", json=ASK)).json()["error"]
    assert "is an encoder and cannot generate text" in error["message"]


# What the server is, and does


async def test_props_tell_no_path():
    runtime = make_runtime(chat_template=CHAT_TEMPLATE)
    try:
        async with make_client(runtime) as client:
            props = (await client.get("/props")).json()
            assert props["chat_template"] == CHAT_TEMPLATE
            assert (props["model_path"], props["model_alias"]) == ("toy", "toy")
            assert props["default_generation_settings"]["n_ctx"] == 2048
            assert props["default_generation_settings"]["params"]["temperature"] == 1
            assert props["total_slots"] == len((await client.get("/slots")).json())
            assert props["modalities"] == {"vision": False, "audio": False}
            assert props["is_sleeping"] is False
            caps = props["chat_template_caps"]
            assert all(isinstance(value, bool) for value in caps.values())
            assert caps["supports_tools"]
            assert caps["supports_tool_calls"]
            assert not caps["supports_typed_content"]
            assert (await client.get("/props?model=other")).json()["error"]["type"] == "not_found_error"
            assert (await client.post("/props", json={})).status_code == 405
    finally:
        runtime.close()


async def test_slots_show_a_request_to_its_owner_alone(gate):
    runtime = make_runtime(gate)
    try:
        async with make_client(runtime, api_keys=("a", "b")) as client:

            async def slots(key):
                return (await client.get("/slots", headers={"Authorization": f"Bearer {key}"})).json()

            body = {"prompt": "Secret", "n_predict": 7, "temperature": 0.5, "logit_bias": [[5, 1]], "seed": 2**64 - 5}
            body |= {"stop": ["Secret too"]}
            asked = asyncio.create_task(client.post("/completion", json=body, headers={"Authorization": "Bearer a"}))
            gate.allow(3)
            await until(lambda: runtime.engine.load().num_running == 1)
            own, other = await slots("a"), await slots("b")
            for told in (own, other):
                assert [slot["is_processing"] for slot in told] == [True] + [False] * (len(told) - 1)
                assert "Secret" not in json.dumps(told)
            assert (own[0]["params"]["temperature"], own[0]["params"]["seed"]) == (0.5, 2**64 - 5)
            assert "logit_bias" not in own[0]["params"]  # there may be many
            assert own[0]["next_token"]["n_decoded"] + own[0]["next_token"]["n_remain"] == 7
            assert set(other[0]) == {"id", "n_ctx", "is_processing"}
            gate.open()
            assert (await asked).json()["tokens_predicted"] == 7
            await until(lambda: runtime.engine.load().num_running == 0)
            assert not any(slot["is_processing"] for slot in await slots("a"))
            response = await client.get("/slots?fail_on_no_slot=1", headers={"Authorization": "Bearer a"})
            assert response.status_code == 200
    finally:
        gate.open()
        runtime.close()


async def test_no_slot_is_an_error_for_those_who_ask_so():
    gate = GatedExecutor(replace(CAPACITY, max_rows=1))
    runtime = make_runtime(gate)
    try:
        async with make_client(runtime) as client:
            asked = asyncio.create_task(client.post("/completion", json=ASK))
            await until(lambda: runtime.engine.load().num_running == 1)
            assert [slot["is_processing"] for slot in (await client.get("/slots")).json()] == [True]
            error = (await client.get("/slots?fail_on_no_slot=1")).json()["error"]
            assert (error["code"], error["type"]) == (503, "unavailable_error")
            gate.open()
            assert (await asked).status_code == 200
    finally:
        gate.open()
        runtime.close()
