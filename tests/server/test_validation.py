"""From a body to a call, and from a call to tokens: what a request means."""

import dataclasses
from types import SimpleNamespace

import pytest

from penstock import fast_json
from penstock.calls.call import TokenPrompt
from penstock.calls.prompts import tokenise
from penstock.clock import WallClock
from penstock.config import ServerConfig
from penstock.deploy.running import ModelInfo, Sources, Uses
from penstock.obs.metrics import Metrics
from penstock.serve.asking import Asked, Reader
from penstock.serve.bodies import parse_body
from penstock.serve.http.checks import SENDER_KEY, RequestIdentity, Sender
from penstock.serve.logprobs import ChatLogprobs, CompletionLogprobs
from penstock.serve.openai.read import chat, completion
from penstock.serve.openai.schemas import ChatCompletionBody, CompletionBody
from penstock.testing import DEFAULT_CAPACITY
from penstock.text.dialects import Dialect
from penstock.types.errors import Rejected, RejectReason
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import SamplingDefaults
from support.deployments import deployment_of
from support.server.harness import END_ID, VOCAB_SIZE, make_tokenizer

TOKENIZER = make_tokenizer()
MODEL = ModelInfo(
    served_names=("toy",),
    root="",
    fingerprint="",
    created_unix_s=0,
    capacity=dataclasses.replace(DEFAULT_CAPACITY, max_model_len=100),
    vocab_size=VOCAB_SIZE,
)
DEFAULTS = SamplingDefaults(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1)


RUNNING = SimpleNamespace(
    name="toy",
    model=MODEL,
    defaults=DEFAULTS,
    tokenizer=TOKENIZER,
    clock=WallClock(),
    sources=Sources(),
    chat_template=None,
    dialect=Dialect(),
    adapters=None,
    uses=Uses(),
    metrics=Metrics("toy"),
    admission=SimpleNamespace(max_len=lambda adapter: MODEL.capacity.max_model_len),
)
HI = [{"role": "user", "content": "a"}]


def call_of(path="completion", **fields):
    """The call that a body becomes."""
    scope = {"headers": [], "penstock.request_identity": RequestIdentity("id", is_from_header=False), SENDER_KEY: Sender()}
    body = {"prompt": "a"} | fields if path == "completion" else {"messages": HI} | fields
    asked = Asked(Reader(deployment_of(RUNNING), ServerConfig()), data := fast_json.dumps(body), scope)
    if path == "completion":
        return completion(parse_body(data, CompletionBody), asked)[0]
    return chat(parse_body(data, ChatCompletionBody), asked)[0]


def sampling(path="completion", **fields):
    return call_of(path, **fields).sampling


def tokenised(num_tokens, path="completion", **fields):
    """The tokens of a call with a prompt of so many."""
    return tokenise(call_of(path, **fields), [TokenPrompt((5,) * num_tokens, "prompt")])


def test_what_is_not_said_is_the_models_default():
    params = sampling()
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (
        0.7,
        0.9,
        40,
        0.05,
        1.1,
    )


def test_what_is_said_wins_even_if_it_is_zero():
    params = sampling(temperature=0, top_k=0, min_p=0)
    assert (params.temperature, params.top_k, params.min_p) == (0, 0, 0)
    assert sampling(top_k=-1).top_k == 0


def test_a_temperature_near_0_is_greedy():
    assert [sampling(temperature=low).temperature for low in (1e-300, 1e-6, 1e-4)] == [0.0, 0.0, 1e-4]


def test_a_top_p_of_0_keeps_the_likeliest_token():
    params = sampling(top_p=0, top_k=40)
    assert (params.top_p, params.top_k) == (1.0, 1)


def test_a_models_top_p_of_0_keeps_the_likeliest_token(monkeypatch):
    monkeypatch.setattr(RUNNING, "defaults", SamplingDefaults(top_p=0.0))
    params = sampling()
    assert (params.top_p, params.top_k) == (1.0, 1)


def test_repeat_last_n_limits_what_the_penalties_count():
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    assert sampling(**penalties, repeat_last_n=64).penalty_window == 64
    assert sampling(**penalties, repeat_last_n=-1).penalty_window is None
    none = sampling(**penalties, repeat_last_n=0)
    assert (none.repetition_penalty, none.frequency_penalty) == (1.0, 0.0)


@pytest.fixture
def with_limits(monkeypatch):
    """A model whose files say how long an answer is, and name a token that none has."""
    limits = {"max_tokens": 20, "banned_token_sequences": ((9,),)}
    monkeypatch.setattr(RUNNING, "defaults", dataclasses.replace(DEFAULTS, **limits))


def test_the_model_s_limit_holds_for_chats_that_have_none(with_limits):
    assert tokenised(10, "chat").max_tokens == [20]
    assert tokenised(90, "chat").max_tokens == [10]  # no more than there is room
    assert tokenised(10, "chat", max_tokens=60).max_tokens == [60]
    assert tokenised(10, "chat", min_tokens=30).max_tokens == [30]
    assert tokenised(10).max_tokens == [16]  # OpenAI's own default


def test_tokens_that_the_model_s_files_ban_are_banned_unless_the_request_allows_tokens(with_limits):
    no = [tuple(TOKENIZER.encode(text, add_special_tokens=False)) for text in ("no", " no")]
    assert tokenised(1).banned == ((9,),)
    assert tokenised(1, bad_words=["no"]).banned == ((9,), *no)
    assert tokenised(1, allowed_token_ids=[8, 9]).banned == ()
    with pytest.raises(Rejected, match="--generation-config none"):
        sampling(use_beam_search=True, n=2)


def test_the_models_end_stops_unless_it_is_ignored():
    assert sampling(stop_token_ids=[9, 5, 9]).stop_token_ids == (END_ID, 5, 9)
    assert sampling(stop_token_ids=[9], ignore_eos=True).stop_token_ids == (9,)


def test_lists_become_sorted_and_unique():
    params = sampling(allowed_token_ids=[7, 3, 7], logit_bias={"10": -1, "9": 2.5})
    assert params.allowed_token_ids == (3, 7)
    assert params.logit_bias == ((9, 2.5), (10, -1.0))


def test_bad_words_are_banned_at_the_start_and_after_a_space():
    encode = TOKENIZER.encode
    assert tokenised(1, bad_words=["no"]).banned == (
        tuple(encode("no", add_special_tokens=False)),
        tuple(encode(" no", add_special_tokens=False)),
    )


def test_one_stop_string_is_a_list_of_one():
    assert sampling(stop="x").stop == ("x",)
    assert sampling(stop=["x", "y"]).stop == ("x", "y")


async def test_choices_draw_with_consecutive_seeds(runtime, client, monkeypatch):
    seeds, open_stream = [], runtime.bridge.open

    def opened(requests):
        seeds.append([request.sampling.seed for request in requests])
        return open_stream(requests)

    monkeypatch.setattr(runtime.bridge, "open", opened)
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 1, "temperature": 1}
    await client.post("/v1/completions", json=body)
    await client.post("/v1/completions", json=body | {"seed": -1})
    # Drawn, each prompt has other seeds than the one before; given, the same.
    assert seeds == [[7, 8, 9, 10], [2**64 - 1, 0, 2**64 - 1, 0]]


def test_default_length_is_16_for_completions_and_the_rest_for_chat():
    assert tokenised(10).max_tokens == [16]
    assert tokenised(10, "chat").max_tokens == [90]
    assert tokenised(99, "chat").max_tokens == [1]
    for path, num_tokens in (("completion", 85), ("chat", 100)):
        with pytest.raises(Rejected) as caught:
            tokenised(num_tokens, path)
        assert caught.value.reason is RejectReason.CONTEXT_LENGTH
        assert caught.value.param == "prompt"


def test_what_was_asked_for_is_too_much_where_the_prompt_fits():
    with pytest.raises(Rejected) as caught:
        tokenised(90, "completion", max_tokens=20)
    assert caught.value.param == "max_tokens"
    for name in ("max_tokens", "max_completion_tokens"):
        assert tokenised(90, "chat", **{name: 20}).max_tokens == [10]


def test_a_prompt_keeps_its_last_tokens():
    def kept(limit, **fields):
        call = call_of(truncate_prompt_tokens=limit, **fields)
        return tokenise(call, [TokenPrompt(tuple(range(3, 200)), "prompt")]).prompts[0]

    assert kept(2) == (198, 199)
    assert len(kept(-1)) == 100 - 16
    assert len(kept(-1, max_tokens=30)) == 70


def test_the_numbers_of_what_does_not_fit_are_told():
    with pytest.raises(Rejected) as caught:
        tokenised(100, max_tokens=1)
    assert "The prompt has 100 and the answer may have 1: 1 too many." in caught.value.detail
    with pytest.raises(Rejected) as caught:
        tokenised(105, max_tokens=50)
    assert "The prompt has 105 and the answer may have 50: 55 too many." in caught.value.detail
    for ids, stops, limit in (([], "1 stop token", 19), ([5], "2 stop tokens", 18)):
        with pytest.raises(Rejected) as caught:
            sampling(n=20, use_beam_search=True, temperature=0, stop_token_ids=ids)
        assert f"and {stops} it can be at most {limit}." in caught.value.message


def test_chat_logprobs_ask_for_alternatives_only_if_told():
    def asked(**fields):
        return sampling("chat", **fields).logprobs

    assert asked() is None
    assert asked(logprobs=False) is None
    assert asked(logprobs=True) == 0
    assert asked(logprobs=True, top_logprobs=4) == 4
    assert asked(top_logprobs=0) is None


def test_a_call_can_not_be_changed():
    call = call_of()
    for part in (call, call.terms, call.answer, call.sampling, call.prompts[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, None)


def entries(text):
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    return [TokenLogprobs(token_id, -1.0, 1, ((token_id, -1.0),)) for token_id in token_ids]


def test_tokens_that_share_a_character_have_its_offset():
    writer = CompletionLogprobs(TOKENIZER, TOKENIZER.bytes_without_special)
    written = writer.write(entries("aé<|end|>b"))
    assert written["text_offset"] == [0, 1, 1, 2, 2]
    assert written["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "<|end|>", "b"]


def test_offsets_go_on_over_steps():
    writer = CompletionLogprobs(TOKENIZER, TOKENIZER.bytes_with_special)
    parts = [writer.write([entry])["text_offset"] for entry in entries("<|end|>é!")]
    assert parts == [[0], [7], [7], [8]]


def chat_content(entries, text):
    """The entries of tokens whose text is shown as far as `text` goes."""
    return ChatLogprobs(TOKENIZER, *[TOKENIZER.bytes_without_special] * 2).write(entries, text, is_last=True)["content"]


def test_chat_tokens_have_their_bytes():
    content = chat_content(entries("é"), "é")
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert [entry["token"] for entry in content] == ["\ufffd", "\ufffd"]


def test_impossible_tokens_have_a_finite_logprob():
    impossible = TokenLogprobs(5, float("-inf"), 1, ((5, float("-inf")),))
    assert chat_content([impossible], TOKENIZER.decode([5]))[0]["logprob"] == -9999.0


def test_tokens_that_are_not_in_the_content_have_no_entry():
    assert [entry["token"] for entry in chat_content(entries("ab<|turn|>cd<|end|>"), "abc")] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("tokens", "text", "pieces"),
    [
        ([b"Hello", b" world"], "Hello wo", [b"Hello", b" wo"]),
        ([b"Hello", b" world"], "Hel", [b"Hel"]),
        ([b"Hello", b" world"], "", []),
        ([b"\xe2\x82", b"\xacA"], "€A", [b"\xe2\x82", b"\xacA"]),
        ([b"\xe2\x82", b"\xacA"], "€", [b"\xe2\x82", b"\xac"]),
        ([b"a\xe2", b"\x82\xac"], "a", [b"a"]),
        ([b"a\xe2", b"\x82"], "a\ufffd", [b"a\xe2", b"\x82"]),
        ([b"a\xe2", b"\xffb"], "a\ufffd\ufffdb", [b"a\xe2", b"\xffb"]),
        ([b"a\xe2", b"\xffb"], "a\ufffd", [b"a\xe2"]),
    ],
    ids=str,
)
def test_a_token_that_is_shown_in_part_has_the_bytes_of_that_part(tokens, text, pieces):
    tokenizer = SimpleNamespace(token_bytes=tokens.__getitem__)
    given = [TokenLogprobs(index, -1.0, 1, ()) for index in range(len(tokens))]
    whole = ChatLogprobs(tokenizer, tokens, tokens).write(given, text, is_last=True)["content"]
    assert [bytes(entry["bytes"]) for entry in whole] == pieces
    # The same, however the tokens and the text come in steps.
    for num_ahead in range(len(text) + 1):
        writer = ChatLogprobs(tokenizer, tokens, tokens)
        steps = [writer.write(given[:1], "", is_last=False), writer.write(given[1:], text[:num_ahead], is_last=False)]
        steps.append(writer.write([], text[num_ahead:], is_last=True))
        assert [entry for step in steps for entry in step["content"]] == whole


@pytest.mark.parametrize(
    ("data", "offsets"),
    [
        ("€A".encode(), [0, 0, 0, 1]),
        (b"\xe2A", [0, 1]),
        (b"\xe2\x82A", [0, 0, 1]),
        (b"\xe2\xe2\x82\xacA", [0, 1, 1, 1, 2]),
        (b"\xe0\x80A", [0, 1, 2]),
        (b"\xffA", [0, 1]),
        (b"\xe2\xffA", [0, 1, 2]),
        ("\ufffdA".encode(), [0, 0, 0, 1]),
    ],
)
def test_offsets_follow_the_text_where_it_is_no_utf8(data, offsets):
    ids_by_byte = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(3, VOCAB_SIZE)}
    entries = [TokenLogprobs(ids_by_byte[bytes([byte])], 0.0, 0, ()) for byte in data]
    writer = CompletionLogprobs(TOKENIZER, TOKENIZER.bytes_without_special)
    assert [offset for entry in entries for offset in writer.write([entry])["text_offset"]] == offsets
