"""tokenizer.json files: the same vocabulary gives the same tokens, and what a file can't say is refused or switched off."""

import base64
import json
import resource

import pytest
from tokenizers import Tokenizer, decoders

from penstock.text.chat import ChatTemplate
from penstock.text.gguf_vocab import build_backend
from penstock.text.grammar import Grammar, GrammarKind, Grammars
from penstock.text.tokenizer import load_tokenizer
from penstock.text.tokenizer_json import MAX_IDS, load_backend
from penstock.types.errors import ModelError, Rejected, RejectReason
from support.work_time import growth

TEXTS = ["the cat and the hat 12345", "  été 👍  ", "<|start|>the<think>x<|end|>", "東京 banana cabana", ""]


def write(path, vocab, decoder, **changes):
    """The file that `tokenizers` itself writes for a vocabulary, with some of its keys changed."""
    encoder = build_backend(vocab).encoder
    encoder.decoder = decoder
    path.write_text(json.dumps(json.loads(encoder.to_str()) | changes), encoding="utf-8")
    return path


def llama_decoder(*, strip: bool):
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


@pytest.fixture
def byte_level_file(tmp_path, byte_level_vocab):
    return write(tmp_path / "tokenizer.json", byte_level_vocab(), decoders.ByteLevel())


def test_nested_steps_take_linear_time(byte_level_vocab, tmp_path):
    def load(count):
        steps = {"type": "Sequence", "normalizers": count * [{"type": "Sequence", "normalizers": []}]}
        load_tokenizer(
            write(tmp_path / "tokenizer.json", byte_level_vocab(), decoders.ByteLevel(), normalizer=steps), eos_token_ids=(0,)
        )

    assert growth(load, 10_000) < 9


@pytest.mark.parametrize("behavior", ["Isolated", "Removed"])
def test_slow_regexes_of_files_are_replaced_where_they_cut_alike(byte_level_vocab, tmp_path, behavior):
    slow = {"type": "Split", "pattern": {"Regex": r"(?=(\d{3})+(?!\d))"}, "behavior": behavior, "invert": False}
    others = [{"type": "Punctuation", "behavior": "Isolated"}, slow, {"type": "Digits", "individual_digits": False}]
    steps = {"type": "Sequence", "pretokenizers": others}
    path = write(tmp_path / "tokenizer.json", byte_level_vocab(), decoders.ByteLevel(), pre_tokenizer=steps)
    of_model = Tokenizer.from_file(str(path)).pre_tokenizer.pre_tokenize_str
    ours = load_backend(path, bos_token_id=None, eos_token=None).encoder.pre_tokenizer.pre_tokenize_str
    assert ours("it's 1234567 89, 12.5") == of_model("it's 1234567 89, 12.5")
    if behavior == "Isolated":
        assert growth(lambda count: ours("1" * count), 5_000) < 9


def test_byte_level_file_gives_the_same_tokens_and_texts_as_the_vocabulary(byte_level_file, byte_level_vocab):
    from_file = load_tokenizer(byte_level_file, bos_token_id=1, eos_token_ids=(0,))
    from_vocab = load_tokenizer(byte_level_vocab())
    for text in TEXTS:
        ids = from_vocab.encode(text, add_special_tokens=True)
        assert from_file.encode(text, add_special_tokens=True) == ids
        assert from_file.decode(ids) == from_vocab.decode(ids)
        assert from_file.decode(ids, skip_special_tokens=False) == text
    assert from_file.special_tokens == from_vocab.special_tokens
    assert [from_file.is_special(token_id) for token_id in range(5)] == [True, True, False, False, False]


def test_tokens_behind_unused_ids_count_and_grammars_allow_them(byte_level_file):
    file = json.loads(byte_level_file.read_text(encoding="utf-8"))
    vocab = file["model"]["vocab"]
    last = vocab["the"] = len(vocab) + 8
    byte_level_file.write_text(json.dumps(file), encoding="utf-8")
    tokenizer = load_tokenizer(byte_level_file, eos_token_ids=(0,))
    assert tokenizer.vocab_size == last + 1
    mask = Grammars(tokenizer, vocab_size=last + 64).matcher(Grammar(GrammarKind.REGEX, "[a-z]+")).mask()
    assert [token_id for token_id in range(last - 20, last + 64) if mask[token_id // 8] >> token_id % 8 & 1][-1] == last
    vocab["the"] = (1 << 32) - 1
    byte_level_file.write_text(json.dumps(file), encoding="utf-8")
    assert load_tokenizer(byte_level_file).vocab_size == MAX_IDS


def test_marks_of_queries_and_documents_are_tokens_of_their_own(byte_level_file):
    plain = load_tokenizer(byte_level_file)
    assert len(plain.encode("the", add_special_tokens=False)) == 1
    mark = plain.encode("t", add_special_tokens=False)
    marked = load_tokenizer(byte_level_file, special_tokens={"markers": ("t",)})
    assert marked.encode("the", add_special_tokens=False)[:1] == mark
    assert marked.vocab_size == plain.vocab_size
    with pytest.raises(ModelError, match="lacks the token 'hehe', which marks"):
        load_tokenizer(byte_level_file, special_tokens={"markers": ("hehe",)})


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_file_gives_the_same_tokens_and_texts_as_the_vocabulary(tmp_path, sentencepiece_vocab, has_prefix):
    vocab = sentencepiece_vocab(add_space_prefix=has_prefix)
    path = write(tmp_path / "tokenizer.json", vocab, llama_decoder(strip=has_prefix))
    from_file, from_vocab = load_tokenizer(path, bos_token_id=1, eos_token_ids=(2,)), load_tokenizer(vocab)
    for text in TEXTS:
        ids = from_vocab.encode(text, add_special_tokens=True)
        assert from_file.encode(text, add_special_tokens=True) == ids
        assert from_file.decode(ids) == from_vocab.decode(ids) == text


def test_sentencepiece_decoding_equals_the_library_s_own_for_valid_text(sentencepiece_vocab):
    tokenizer, decoder = load_tokenizer(sentencepiece_vocab()), llama_decoder(strip=True)
    for text in (text for text in TEXTS if text):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == decoder.decode([sentencepiece_vocab().tokens[token_id] for token_id in ids])


def test_metaspace_files_are_read(tmp_path, sentencepiece_vocab):
    path = write(tmp_path / "tokenizer.json", sentencepiece_vocab(), decoders.Metaspace())
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("the cat", add_special_tokens=False)) == "the cat"


def with_added(path, content, **changes):
    """The file with a token added, or one of its tokens marked as added."""
    file = json.loads(path.read_text(encoding="utf-8"))
    vocab = file["model"]["vocab"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    token = {"id": vocab.get(content, len(vocab)), "content": content} | flags | changes
    others = [other for other in file["added_tokens"] if other["content"] != content]
    path.write_text(json.dumps(file | {"added_tokens": [*others, token]}), encoding="utf-8")
    return token["id"]


def test_added_tokens_of_space_marks_are_spaces(tmp_path, sentencepiece_vocab):
    """Gemma's files have them."""
    path = write(tmp_path / "tokenizer.json", sentencepiece_vocab(add_space_prefix=False), llama_decoder(strip=False))
    added = with_added(path, "▁" * 4)
    assert load_tokenizer(path).decode([added]) == "    "


def test_added_tokens_have_the_name_in_the_file_even_if_they_are_normalized(tmp_path, sentencepiece_vocab):
    """transformers adds tokens so. Version 0.23 of the library puts the normalizer's space mark before their names."""
    path = write(tmp_path / "tokenizer.json", sentencepiece_vocab(), llama_decoder(strip=True))
    added, end = with_added(path, "<|im_start|>", normalized=True), with_added(path, "</s>", normalized=True, special=True)
    tokenizer = load_tokenizer(path, special_tokens={"eos_token": "</s>"})
    assert [tokenizer.token_text(token_id) for token_id in (added, end)] == ["<|im_start|>", "</s>"]
    assert tokenizer.eos_token_ids == (end,)


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path, byte_level_vocab):
    path = write(
        tmp_path / "tokenizer.json",
        byte_level_vocab(),
        decoders.ByteLevel(),
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|end|>",
        },
    )
    assert len(load_tokenizer(path).encode("a" * 20, add_special_tokens=True)) == 20


def test_an_end_token_that_the_file_calls_plain_is_special_if_the_caller_says_so(byte_level_file):
    tokenizer = load_tokenizer(byte_level_file, eos_token_ids=(2,))
    assert tokenizer.is_special(2)
    assert tokenizer.eos_token_ids == (2,)


def test_the_tokenizer_s_own_end_token_comes_first(byte_level_file):
    tokenizer = load_tokenizer(byte_level_file, eos_token_ids=(0,), special_tokens={"eos_token": "<think>"})
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.is_special(2)


def test_an_end_token_that_the_vocabulary_lacks_is_named_in_the_log(byte_level_file, caplog):
    tokenizer = load_tokenizer(byte_level_file, eos_token_ids=(0,), special_tokens={"eos_token": "<|nowhere|>"})
    assert tokenizer.eos_token_ids == (0,)
    assert "there is no token '<|nowhere|>'" in caplog.text


def test_templates_see_the_tokens_that_the_files_name(byte_level_file):
    named = {"bos_token": None, "pad_token": "[PAD3]", "image_token": "<img>", "additional_special_tokens": ("<think>",)}
    tokenizer = load_tokenizer(byte_level_file, bos_token_id=1, eos_token_ids=(0,), special_tokens=named)
    found = {name: text for name, text in named.items() if text is not None}
    assert tokenizer.special_tokens == {"eos_token": "<|end|>"} | found
    source = "{{ bos_token }}{{ bos_token is defined }}{{ eos_token }}{{ image_token }}{{ additional_special_tokens[0] }}"
    template = ChatTemplate(source, special_tokens=tokenizer.special_tokens)
    assert template.render([{"role": "user", "content": ""}]) == "False<|end|><img><think>"


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "not a valid tokenizer.json"), ("{}", "not a valid tokenizer.json"), ('{"a": \x00', "not a valid tokenizer.json")],
)
def test_a_broken_file_is_refused(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="not a valid"):
        load_tokenizer(path)


@pytest.mark.parametrize(("decoder", "name"), [(decoders.CTC(), "CTC"), (None, "nothing")])
def test_a_decoder_whose_bytes_are_unknown_is_refused(tmp_path, byte_level_vocab, decoder, name):
    encoder = build_backend(byte_level_vocab()).encoder
    if decoder is not None:
        encoder.decoder = decoder
    path = tmp_path / "tokenizer.json"
    path.write_text(encoder.to_str(), encoding="utf-8")
    with pytest.raises(ModelError, match=name):
        load_tokenizer(path)


def replace(content, **pattern):
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*normalizers):
    return {"type": "Sequence", "normalizers": list(normalizers)}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEXT_ITSELF = {"Sequence": {"id": "A", "type_id": 0}}
PAIR = [TEXT_ITSELF, {"Sequence": {"id": "B", "type_id": 1}}]


def precompiled(trie, targets):
    charsmap = base64.b64encode(len(trie).to_bytes(4, "little") + trie + targets).decode()
    return {"type": "Precompiled", "precompiled_charsmap": charsmap}


class TestExpansion:
    """A file's steps before the vocabulary can multiply a text. 62 characters became 3.4 GB."""

    @pytest.mark.parametrize(
        "changes",
        [
            {"normalizer": replace("x" * 1000, String="a")},
            {"normalizer": replace("x" * 1000, Regex="[ab]")},
            {"normalizer": {"pattern": {"String": "a"}, "content": "x" * 1000}},  # the library needs no type
            {"normalizer": sequence(replace("a" * 10, String="a"), sequence(replace("a" * 10, String="a")))},
            {"normalizer": sequence(*[replace("aa", String="a")] * 40)},
            {"normalizer": {"type": "Prepend", "prepend": "x" * 100_000}},
            {"normalizer": precompiled(bytes(1024), b"x" * 1000 + b"\0")},
            {"normalizer": sequence(*[{"type": "Lowercase"}] * 1000)},
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 30}},
            {"post_processor": {"type": "TemplateProcessing", "single": [TEXT_ITSELF] * 9, "pair": PAIR, "special_tokens": {}}},
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, TEXT_ITSELF],
                    "pair": PAIR,
                    "special_tokens": {"x": {"id": "x", "ids": [0] * 100_000, "tokens": ["x"] * 100_000}},
                }
            },
            {
                "normalizer": replace("x" * 50, String="a"),
                "added_tokens": [
                    {"id": 0, "content": "a" * (1 << 18), "normalized": True}
                    | dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
                ],
            },
        ],
    )
    def test_a_file_that_goes_too_far_is_refused_at_start(self, tmp_path, byte_level_vocab, changes):
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ModelError, match=r"exceeds the limit|would make|around it"):
            load_tokenizer(write(tmp_path / "tokenizer.json", byte_level_vocab(), decoders.ByteLevel(), **changes))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 64 << 10

    def test_damaged_replacements_are_refused_at_start(self, tmp_path, byte_level_vocab):
        changes = {"normalizer": precompiled(b"\xff" * 1024, b"x\0")}
        with pytest.raises(ModelError, match="precompiled_charsmap is damaged"):
            load_tokenizer(write(tmp_path / "tokenizer.json", byte_level_vocab(), decoders.ByteLevel(), **changes))

    def test_one_that_goes_far_takes_shorter_texts(self, tmp_path, byte_level_vocab):
        changes = {"normalizer": replace("x" * 20, String="a")}
        tokenizer = load_tokenizer(write(tmp_path / "tokenizer.json", byte_level_vocab(), decoders.ByteLevel(), **changes))
        assert len(tokenizer.encode("a" * 100, add_special_tokens=False)) == 2000
        with pytest.raises(Rejected, match="40 times as many") as caught:  # byte-level, besides
            tokenizer.encode("a" * 300_000, add_special_tokens=False)
        assert caught.value.reason is RejectReason.CONTEXT_LENGTH

    def test_the_steps_of_known_models_take_the_longest_texts(self, tmp_path, byte_level_vocab, sentencepiece_vocab):
        nfc = write(tmp_path / "a.json", byte_level_vocab(pre="qwen2"), decoders.ByteLevel())
        marks = write(tmp_path / "b.json", sentencepiece_vocab(), llama_decoder(strip=True))
        for path in (nfc, marks):
            assert load_tokenizer(path).encode(" " * (1 << 20), add_special_tokens=False)

    @pytest.mark.parametrize(("pattern", "message"), [("(a+)+$", "retry-limit-in-match"), ("x*", "index out of bounds")])
    def test_a_regex_that_the_library_gives_up_is_the_text_s_end_and_not_the_server_s(
        self, tmp_path, byte_level_vocab, pattern, message
    ):
        changes = {"normalizer": replace("bb", Regex=pattern)}
        tokenizer = load_tokenizer(write(tmp_path / "tokenizer.json", byte_level_vocab(), decoders.ByteLevel(), **changes))
        with pytest.raises(Rejected, match=message) as caught:
            tokenizer.encode("a" * 40 + "b", add_special_tokens=False)
        assert caught.value.reason is RejectReason.INVALID

    def test_a_tokenizer_that_fails_on_every_text_can_not_show_which_tokens_enclose_one(self, tmp_path, byte_level_vocab):
        changes = {"normalizer": replace("bb", Regex="x*")}
        tokenizer = load_tokenizer(write(tmp_path / "tokenizer.json", byte_level_vocab(), decoders.ByteLevel(), **changes))
        with pytest.raises(Rejected, match="tokenizer fails on this text"):
            tokenizer.with_ends([[5, 6]])
