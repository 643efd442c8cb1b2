"""Byte-level vocabularies: encoding, decoding, added tokens, and what is refused."""

import dataclasses
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, pre_tokenizers

from penstock.text.gguf_vocab import RECIPES, build_backend, make_pre_tokenizer, recipe_for
from penstock.text.tokenizer import load_tokenizer
from penstock.text.vocabulary import LINEAR
from penstock.types.errors import ModelError, Rejected, RejectReason
from penstock.types.vocab import GgufVocab
from support.work_time import growth

TRICKY = [
    "",
    "the cat and the hat 12345",
    "  two   runs    of spaces \t\n\r\n",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 ❤️",
    "e\u0301 n\u0303 \u0928\u093f ก็",
    "nul \x00 del \x7f",
    "\ufeffbom \u2028 \u00a0",
    "<think>hm</think><|end|><|start|>",
]


@pytest.fixture(scope="module")
def tokenizer(byte_level_vocab):
    return load_tokenizer(byte_level_vocab())


@pytest.mark.parametrize("text", TRICKY)
def test_decoding_an_encoded_text_gives_it_back(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(text=st.text())
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()


def test_merges_apply_in_order_of_their_rank(tokenizer):
    ids = tokenizer.encode("the and then", add_special_tokens=False)
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["the", " and", " the", "n"]


def test_every_single_byte_has_a_token(tokenizer):
    by_bytes = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= by_bytes


@given(ids=st.lists(st.integers(0, 272)))
def test_decoding_equals_the_library_s_own_decoder(tokenizer, byte_level_vocab, ids):
    vocab = byte_level_vocab()
    ids = [token_id for token_id in ids if token_id != 3]
    assert tokenizer.decode(ids, skip_special_tokens=False) == decoders.ByteLevel().decode([vocab.tokens[i] for i in ids])


def test_control_tokens_are_recognised_in_text_and_skipped_when_decoding(tokenizer):
    ids = tokenizer.encode("<|start|>the<|end|>", add_special_tokens=False)
    assert ids[0] == 1
    assert ids[-1] == 0
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>the<|end|>"


def test_user_defined_tokens_are_whole_and_visible(tokenizer):
    ids = tokenizer.encode("a<think>b", add_special_tokens=False)
    assert ids[1] == 2
    assert not tokenizer.is_special(2)
    assert tokenizer.decode(ids) == "a<think>b"


def test_unused_and_unknown_ids_are_silent(tokenizer):
    assert tokenizer.token_bytes(3) == b""
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_bytes(-1) == b""


def test_every_id_has_its_piece_even_if_two_have_the_same(byte_level_vocab):
    vocab = byte_level_vocab()
    pieces = [*vocab.tokens, vocab.tokens[5]]
    twice = byte_level_vocab(tokens=pieces, token_types=[*vocab.token_types, 1])
    for made in (vocab, twice):
        backend = build_backend(made)
        assert [backend.piece(token_id) for token_id in range(len(made.tokens))] == list(made.tokens)
        assert [backend.piece(token_id) for token_id in (-1, len(made.tokens), 1 << 40)] == [None] * 3


def test_bos_and_eos_are_special_even_if_the_file_calls_them_normal(byte_level_vocab):
    vocab = byte_level_vocab()
    tokenizer = load_tokenizer(dataclasses.replace(vocab, token_types=[1, 1, *vocab.token_types[2:]]))
    assert tokenizer.is_special(0)
    assert tokenizer.is_special(1)
    assert tokenizer.encode("<|end|>", add_special_tokens=False) == [0]


def test_bos_and_eos_are_added_only_when_asked_for(byte_level_vocab):
    tokenizer = load_tokenizer(byte_level_vocab(add_bos_token=True, add_eos_token=True))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the", add_special_tokens=True) == [1, *plain, 0]


@pytest.mark.parametrize("name", ["<s:0>", "$A", "a b", "bos"])
def test_bos_may_have_any_text(byte_level_vocab, name):
    vocab = byte_level_vocab(add_bos_token=True)
    tokenizer = load_tokenizer(dataclasses.replace(vocab, tokens=["<|end|>", name, *vocab.tokens[2:]]))
    assert tokenizer.encode("x", add_special_tokens=True)[0] == 1


def test_special_tokens_are_named_for_chat_templates(byte_level_vocab):
    tokenizer = load_tokenizer(byte_level_vocab(unknown_token_id=0))
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>", "unk_token": "<|end|>"}
    assert load_tokenizer(byte_level_vocab(padding_token_id=3)).special_tokens["pad_token"] == "[PAD3]"
    assert load_tokenizer(byte_level_vocab(bos_token_id=None, eos_token_id=None)).special_tokens == {}


def test_further_end_tokens_are_special_and_come_after_the_vocabulary_s_own(byte_level_vocab):
    tokenizer = load_tokenizer(byte_level_vocab(), eos_token_ids=(7, 0))
    assert tokenizer.eos_token_ids == (0, 7)
    assert tokenizer.is_special(7)
    assert tokenizer.decode([7]) == ""


def test_a_batch_is_encoded_as_its_members(tokenizer):
    assert tokenizer.encode_batch(TRICKY, add_special_tokens=True) == [
        tokenizer.encode(text, add_special_tokens=True) for text in TRICKY
    ]
    assert tokenizer.encode_batch([], add_special_tokens=True) == []


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00", "\ud83d\ude00"])
def test_a_lone_surrogate_is_refused_and_located(tokenizer, text):
    with pytest.raises(Rejected, match="lone surrogate") as caught:
        tokenizer.encode(text, add_special_tokens=False)
    assert caught.value.reason is RejectReason.INVALID


def test_long_texts_are_not_truncated_and_leave_other_threads_running(tokenizer):
    text = "the cat and the hat\n" * 30_000
    started, ticks, done = threading.Event(), [0], threading.Event()

    def tick():
        while not done.is_set():
            ticks[0] += 1
            started.set()
            done.wait(0.0001)

    thread = threading.Thread(target=tick)
    thread.start()
    started.wait()
    before = ticks[0]
    ids = tokenizer.encode(text, add_special_tokens=False)
    during = ticks[0] - before
    done.set()
    thread.join()
    assert tokenizer.decode(ids) == text
    assert during > 1


def test_an_unknown_pre_tokeniser_is_refused_by_name(byte_level_vocab):
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre is 'klingon'.*Hugging Face directory"):
        load_tokenizer(byte_level_vocab(pre="klingon"))


def test_a_missing_pre_tokeniser_name_means_the_default():
    assert recipe_for("") is RECIPES["default"]


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("smollm", "in 2024, it's", ["in", "Ġ", "2", "0", "2", "4", ",", "Ġit", "'s"]),
        ("gpt-2", "in 2024, it's", ["in", "Ġ2024", ",", "Ġit", "'s"]),
        ("llama-bpe", "in 12345, IT'S\n\nx", ["in", "Ġ", "123", "45", ",", "ĠIT", "'S", "ĊĊ", "x"]),
        ("qwen2", "in 123, IT'S\n\nx", ["in", "Ġ", "1", "2", "3", ",", "ĠIT", "'S", "ĊĊ", "x"]),
        ("tekken", "camelCase URLs 12", ["camel", "Case", "ĠURLs", "Ġ", "1", "2"]),
        ("default", "in 1234, (x)", ["in", "Ġ", "123", "4", ",", "Ġ", "(", "x", ")"]),
        ("smollm", "a   b  ", ["a", "ĠĠ", "Ġb", "ĠĠ"]),
        ("llama-bpe", "a   b  ", ["a", "ĠĠ", "Ġb", "ĠĠ"]),
    ],
)
def test_text_is_cut_as_the_vocabulary_s_makers_did(name, text, parts):
    cut = make_pre_tokenizer(recipe_for(name)).pre_tokenize_str(text)
    assert [part for part, _ in cut] == parts


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        ("falcon3 smaug-bpe lfm2 dbrx", ["in", " ", "123", "45", ",", " IT", "'S", "\n\n", "x"]),
        ("deepseek-r1-qwen stablelm2 hunyuan", ["in", " ", "1", "2", "3", ",", " IT", "'S", "\n\n", "x"]),
        ("deepseek-llm", ["it", "'", "s", " ABC", "1", "2", ";", "\r", "\n", " =", " x", "  "]),
        ("deepseek-llm", ["\u5b57\u5b57", " \U0001d400", "a", "\u3002", "\u3042"]),
        ("deepseek-coder", ["it", "'", "s", " ABC", "1", "2", ";", "\r", "\n", " =", " x", "  "]),
        ("deepseek-v3 hunyuan-dense", ["a", "_b", " =", " ", "123", "4", " ", "\u5b57\u3042", " x", "\n"]),
        ("spark2_5", ["a", "_b", " =", " ", "1", "2", "3", "4", " ", "\u5b57\u3042", " x", "\n"]),
        ("minicpm5", ["in", " ", "123", "45", "x"]),
        ("seed-coder", ["a", ";", "\n", "1", "2"]),
        ("gpt-4o llama4 youtu", ["IT'S", " camel", "Case", "!/\n"]),
        ("cohere2moe", ["1", "234", "567", " x"]),
        ("bloom poro-chat", ["one", ",", " two", "."]),
        ("viking", ["one", ",", " two", "1", "2"]),
        ("llada-moe", ["it", "'s", " ", "1", "2"]),
        ("exaone-moe", ["in the", " ", "1"]),
        ("qwen35", ["e\u0301e", "!"]),
        ("falcon", ["in", " ", "123", "45", "`", "x"]),
        ("command-r", ["in", " ", "1", "2"]),
        ("glm5", ["in", " ", "123", "45", ",", " IT", "'S", "\n\n", "x"]),
        ("jais-2", ["in", " ", "123", "4", ",", "    ", "  ", " x", "\n\n"]),
        ("granite-embed-multi-97m", ["IT'S", " camel", "Case", "!/\n"]),
        ("kimi-k2", ["IT'S", " camel", "Case", "\u5b57\u5b57", "a", " ", "123", "4", "!\n"]),
        ("superbpe", ["in ", "1", "234", "567", ", it's all one part\n"]),
        ("afmoe", ["a", "_b", " ", "12", "345", "678", "\u5b57\u3042", " x", "!\n"]),
        ("laguna", ["in", " ", "1", "2", ",", " IT", "'S", "\n\n\n", "x", "  "]),
        ("jina-v1-en roberta-bpe jina-v2-code", ["in", " 2024", ",", " it", "'s"]),
    ],
)
def test_further_vocabularies_cut_text_as_their_makers_did(names, parts):
    for name in names.split():
        cut = make_pre_tokenizer(recipe_for(name)).pre_tokenize_str("".join(parts))
        assert [decoders.ByteLevel().decode([part]) for part, _ in cut] == parts, name


@pytest.mark.parametrize("name", ["gemma4", "granite-embed-multi-311m", "sarvam-moe"])
def test_vocabularies_that_spell_text_are_cut_at_lines_alone(name):
    """Their spaces are marks, and characters without a piece become bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "\u2581", "b", "\n", "a\u2581", "a\u2581b", "\n\n"]
    vocab = GgufVocab(
        model="gemma4" if name == "gemma4" else "gpt2",
        pre=name,
        tokens=pieces,
        token_types=[2] + [6] * 256 + [1] * 7,
        merges=["a \u2581", "a\u2581 b", "\n \n"],
        scores=[],
        bos_token_id=None,
        eos_token_id=None,
        unknown_token_id=0,
        add_bos_token=False,
        add_eos_token=False,
        add_space_prefix=False,
    )
    tokenizer = load_tokenizer(vocab)
    ids = tokenizer.encode("a b\n\na\u00e9", add_special_tokens=False)
    assert [pieces[token_id] for token_id in ids] == ["a\u2581b", "\n\n", "a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "a b\n\na\u00e9"
    assert tokenizer.encode(" a", add_special_tokens=False) == [pieces.index("\u2581"), pieces.index("a")]


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if not recipe.is_raw])
def test_every_recipe_keeps_all_of_the_text(byte_level_vocab, name):
    tokenizer = load_tokenizer(byte_level_vocab(pre=name))
    text = "It's 12345 naïve!!\r\n\n  URLs, 3.5€ — 東京 🇫🇷 ok\t"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("slow", LINEAR)
@given(text=st.text("0123\u0663\u00bd\u2167a_. \n\r\u2028\u0301", max_size=24))
def test_regexes_that_replace_slow_ones_cut_at_the_same_places(slow, text):
    of_model, ours = (pre_tokenizers.Split(Regex(regex), "isolated") for regex in (slow, LINEAR[slow]))
    assert ours.pre_tokenize_str(text) == of_model.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("name", "character", "size"),
    [
        ("superbpe", "1", 5_000),
        ("afmoe", "\u00bd", 10_000),
        ("tiny_aya", "1", 5_000),
        ("deepseek-llm", " ", 5_000),
        ("jais-2", " ", 80_000),
    ],
)
def test_long_runs_of_digits_and_spaces_take_linear_time(name, character, size):
    cut = make_pre_tokenizer(recipe_for(name)).pre_tokenize_str
    assert growth(lambda count: cut(character * count + "\u5b57"), size) < 9


def test_jais_2_looks_for_newlines_after_punctuation_alone():
    """A run of spaces after a newline has none, unless punctuation took that newline."""
    cut = make_pre_tokenizer(recipe_for("jais-2")).pre_tokenize_str("!\n \n  \n x")
    assert [decoders.ByteLevel().decode([part]) for part, _ in cut] == ["!\n", " \n  \n", " x"]


def test_llama_3_takes_a_whole_part_from_the_vocabulary_without_merging(byte_level_vocab):
    vocab = byte_level_vocab(pre="llama-bpe")
    vocab = dataclasses.replace(vocab, tokens=[*vocab.tokens, "xyz"], token_types=[*vocab.token_types, 1])
    assert len(load_tokenizer(vocab).encode("xyz", add_special_tokens=False)) == 1
    assert len(load_tokenizer(dataclasses.replace(vocab, pre="smollm")).encode("xyz", add_special_tokens=False)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "'rwkv'"),
        ({"tokens": [], "token_types": []}, "no tokens"),
        ({"token_types": [1]}, "1 token types"),
        ({"merges": ["nospace"]}, "two pieces"),
        ({"merges": []}, "no merges that would make them"),
        ({"merges": ["x notthere"]}, "do not fit"),
        ({"bos_token_id": 10**6}, "bos token is 1000000"),
        ({"eos_token_id": -1}, "eos token is -1"),
        ({"bos_token_id": None, "add_bos_token": True}, "asks for its bos token"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(byte_level_vocab, changes, message):
    with pytest.raises(ModelError, match=message):
        load_tokenizer(byte_level_vocab(**changes))
