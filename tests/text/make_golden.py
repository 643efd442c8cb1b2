"""Makes golden/smollm2.json: encodings and chat prompts by transformers, for `test_smollm2.py`. Run by hand, not by pytest.

    python tests/text/make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf tests/text/golden/smollm2.json

Needs transformers, gguf and regex. transformers reads the vocabulary from the GGUF file but not its pre-tokeniser, so
that is set here to what the model's own tokenizer.json says: single digits, then GPT-2's pattern. Every encoding is
checked against a second, independent one: plain BPE in Python.
"""

import json
import sys
from pathlib import Path

import regex
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

GPT2_PATTERN = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

SENTENCES = """
The quick brown fox jumps over the lazy dog.
It's what we'd've said, isn't it? THEY'LL SAY "NO"; I'M SURE.
Prices rose 3.14% to $1,234,567.89 in 2024 (from 1999's 0x7F).
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.
Où est passé l'été ? Là-bas, naïve Noël façade cœur.
¿Dónde está el niño? ¡Ahí, señor!
Съешь ещё этих мягких французских булок, да выпей чаю.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.
نص حكيم له سر قاطع وذو شأن عظيم
דג סקרן שט בים מאוכזב ולפתע מצא חברה
ऋषियों को सताने वाले दुष्ट राक्षसों
いろはにほへと ちりぬるを 東京は日本の首都です。
我能吞下玻璃而不伤身体。
키스의 고유조건은 입술끼리 만나야 하고
เป็นมนุษย์สุดประเสริฐเลิศคุณค่า
👩‍👩‍👧‍👦 family, 🇫🇷🇩🇪 flags, 👍🏽 skin, ❤️ heart, 🏴‍☠️ pirate
e\u0301 is not é, n\u0303 is not ñ, Å is not \u212b
²³¹ ½ Ⅷ ٣٤٥ ४५६ ①②③ 𝟘𝟙𝟚
a\u00a0b\u2003c\u200bd\u3000e\ufefff
<b>bold</b> &amp; <!-- comment --> </html>
def add(a: int, b: int = 0) -> int:\\n    return a + b  # sum\\n
for (int i = 0; i < n; ++i) { sum += x[i] * 2; }\\n\\t\\treturn sum;
SELECT * FROM users WHERE id IN (1, 22, 333) AND name LIKE '%o''k%';
https://example.org/a/b?c=d&e=%20f#g user@example.com
{"key": [1, 2.5e-10, null, true], "nested": {"a\\\\n": "b"}}
#include <stdio.h>\\r\\nint main(void) {\\r\\n\\treturn 0;\\r\\n}\\r\\n
$\\\\frac{\\\\partial f}{\\\\partial x} = \\\\sum_{i=0}^{n} x_i^2$
<|im_start|>user
<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
<|im_end|><|im_end|> <|im_end|>text<|endoftext|>more
<|im_start |> < |im_end|> <|IM_END|> im_end|>
<repo_name>penstock<file_sep>main.py<jupyter_code>
Supercalifragilisticexpialidocious antidisestablishmentarianism
aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
camelCaseName snake_case_name kebab-case-name SCREAMING_CASE dotted.name
--------- ========= ********* ......... !!!!!!!!! ?????????
’curly’ “quotes” – dashes — and … dots
\x00 nul, \x07 bell, \x1b escape, \x7f delete
""".strip().split("\n")


def texts() -> list[str]:
    """About 230: sentences, runs of one thing, and every ASCII character between letters."""
    lines = [line.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r") for line in SENTENCES]
    runs = [unit * count for unit in (" ", "\n", "\t", "\r\n", "0", "9", "é", "👍", "\u3000") for count in (1, 2, 3, 4, 7, 16)]
    mixed = [f"a{space}b{space}1{space}!{space}" for space in (" ", "  ", "   ", "\n", " \n", "\n ", "\t ", "\n\n\n")]
    single = [f"x{chr(code)}y" for code in range(128)]
    return ["", *lines, *runs, *mixed, *single]


CHATS = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "  spaces  and\nlines\n"},
    ],
    [{"role": "user", "content": "{{ 7 * 7 }} {% raw %} <|im_end|>"}],
]


def byte_characters() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def plain_bpe(text: str, ranks: dict[tuple[str, str], int], ids: dict[str, int], special: list[str]) -> list[int]:
    """Byte-level BPE as its inventors wrote it down: no library, no cleverness."""
    characters, out = byte_characters(), []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            out.append(ids[part])
            continue
        for cut in regex.split(r"(\p{N})", part):
            for word in GPT2_PATTERN.findall(cut):
                symbols = [characters[byte] for byte in word.encode()]
                symbols = [symbol for symbol in symbols if symbol in ids]
                while len(symbols) > 1:
                    at = min(range(len(symbols) - 1), key=lambda i: ranks.get((symbols[i], symbols[i + 1]), 1 << 30))
                    if (symbols[at], symbols[at + 1]) not in ranks:
                        break
                    symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
                out += [ids[symbol] for symbol in symbols]
    return out


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = json.loads(backend.to_str())["model"]
    ranks = {(pair[0], pair[1]): rank for rank, pair in enumerate(model["merges"])}
    special = [token.content for token in backend.get_added_tokens_decoder().values()]
    encodings = []
    for text in texts():
        ids = tokenizer.encode(text, add_special_tokens=False)
        if ids != plain_bpe(text, ranks, model["vocab"], special):
            raise SystemExit(f"transformers and plain BPE disagree on {text!r}")
        encodings.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=True)})
    chats = [
        {
            "messages": messages,
            "open": tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
            "closed": tokenizer.apply_chat_template(messages, tokenize=False),
            "continued": tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True),
        }
        for messages in CHATS
    ]
    result = {"vocab_size": len(model["vocab"]), "encodings": encodings, "chats": chats}
    target.write_text(json.dumps(result, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{len(encodings)} encodings, {len(chats)} chats")


if __name__ == "__main__":
    main()
