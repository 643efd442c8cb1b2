"""Code and formulas in answers, whose libraries are loaded when they are needed."""

from __future__ import annotations

import pytest

from penstock.serve.ops.page import PAGE_PATHS
from support.page.chatting import ask, complete

FETCHED = (
    "return performance.getEntriesByType('resource').filter((one) => one.name.includes('/vendor/')).map((one) => one.name)"
)
CODE = "def add(a):\n    return \"<b>&amp;\" + a  # 1 < 2 & 'x'"
FORMULAS = r"""The root of \(x^2 = 2\) is $\sqrt{2}$, and *half* of $$\frac{a}{b}$$ too.

\[
\sum_{k=1}^{n} k
+ \alpha
= \frac{n(n+1)}{2}
\]

$$\int_0^1 x\,dx$$"""
PLAIN = r"""It costs $5 or $6, in $HOME/$PATH, a \$ and \\(b\\), and $ c $ and \(d.

$$
not ended"""


def fetched(page) -> list[str]:
    return [name.rpartition("/vendor/")[2] for name in page.run(FETCHED)]


def say(page, text) -> None:
    page.server.says[0] = text
    ask(page)
    complete(page)


def show(page, text) -> None:
    """Show a whole text in place of what is there, without asking."""
    page.run(
        """
        window.isShown = false;
        import("/page/markdown.js").then(({ MarkdownView }) => {
          document.getElementById("log").replaceChildren();
          new MarkdownView(document.getElementById("log")).show(arguments[0]);
          window.isShown = true;
        });
        """,
        text,
    )
    page.until("return window.isShown")


def test_code_has_its_colours_and_its_text(page):
    say(page, f"```py\n{CODE}\n```")
    page.find(".answer pre .hljs-keyword")
    assert page.run("return document.querySelector('.answer pre code').textContent") == CODE
    words = page.run("return Array.from(document.querySelectorAll('.answer pre .hljs-keyword'), (one) => one.textContent)")
    assert words == ["def", "return"]
    assert sorted(fetched(page)) == ["highlight/core.min.js", "highlight/python.min.js"]


def test_nothing_is_loaded_without_need(page):
    for text in ("Hello, *reader*.", "```\nplain\n```", "```nonsense\nplain\n```", "```python\nnot ended", PLAIN):
        show(page, text)
        assert fetched(page) == [], text
        assert page.run("return document.querySelectorAll('#log math, #log [class^=hljs]').length") == 0, text


def test_a_last_dollar_ends_no_formula_while_the_text_grows(page):
    """`$HOME/$` would be one; with `PATH` behind it, it is none."""
    shown = """return import("/page/markdown.js").then(({ MarkdownView }) => {
        const target = document.createElement("div");
        new MarkdownView(target).show(arguments[0], arguments[1]);
        return target.querySelectorAll(".formula").length;
    })"""
    assert page.run(shown, "In $HOME/$", True) == 0
    assert page.run(shown, "In $HOME/$", False) == 1
    assert page.run(shown, "In $HOME/$,", True) == 1


def test_what_looks_like_a_formula_is_shown_as_it_is(page):
    say(page, PLAIN)
    assert page.text(".answer p") == r"It costs $5 or $6, in $HOME/$PATH, a $ and \(b\), and $ c $ and \(d."


def test_formulas_become_mathml(page):
    say(page, FORMULAS)
    page.until("return document.querySelectorAll('.answer math').length === 5")
    for selector in (
        "p msqrt",
        "p em",
        "p math[display=block] mfrac",
        ".formula math munderover",
        ".formula math[display=block]",
    ):
        page.find(f".answer > .text {selector}")
    assert fetched(page) == ["temml/temml.min.js"]
    assert "\\" not in page.text(".answer > .text")


def test_a_formula_that_cannot_be_drawn_is_shown_as_its_source(page):
    for tex in (
        r"\frac{a",
        r"\nosuch",
        r"\href{javascript:window.hacked=1}{x}",
        r"\includegraphics{http://127.0.0.1:9/x.png}",
        r"\class{x}{y}",
        r"\def\a{\a\a}\a",
    ):
        show(page, f"$${tex}$$")
        page.until("return document.querySelector('.formula').title !== ''")
        assert page.text("#log .formula") == f"$${tex}$$"
        assert page.run("return document.querySelectorAll('#log :is(math, a, img)').length") == 0, tex


def test_a_formula_is_no_larger_than_the_page(page):
    say(page, r"$$\rule{9000em}{9000em} \kern{9000em}$$")
    page.find(".answer math")
    assert page.run("return document.querySelector('.answer .formula').clientHeight") < 500
    assert page.run("return document.documentElement.scrollWidth") <= 1280


@pytest.mark.parametrize("text", ["```json\n" + '"' * 10_001 + "\n```", "$$" + "x" * 5001 + "$$"], ids=["code", "formula"])
def test_what_is_too_long_stays_as_it_is(page, text):
    """The time of a grammar grows with the square of odd text."""
    show(page, text)
    assert text.strip("`json$\n") in page.run("return document.getElementById('log').textContent")
    assert fetched(page) == []


def test_every_grammar_that_is_named_is_there(page):
    names = page.run("""
        return fetch("/page/highlight.js").then((response) => response.text())
          .then((text) => Array.from(text.matchAll(/(\\w+): "/g), (one) => one[1]));
    """)
    assert len(names) > 10
    served = {path.removeprefix("/page/vendor/highlight/") for path in PAGE_PATHS if "/highlight/" in path}
    assert served == {"core.min.js", *(f"{name}.min.js" for name in names)}


def test_an_escaped_bar_is_part_of_its_cell(page):
    show(page, "| a | b |\n|---|---|\n| `x \\| y` | or |\n| p \\| q | z \\|")
    assert page.run("return Array.from(document.querySelectorAll('#log td'), (one) => one.textContent)") == [
        "x | y",
        "or",
        "p | q",
        "z |",
    ]


def html(page, text) -> str:
    show(page, text)
    return page.run("return document.getElementById('log').innerHTML").replace(' dir="auto"', "")


@pytest.mark.parametrize(
    "address",
    ["https://a.b/Go_(game)", "https://a.b/(x)(y_(z))/", "https://a.b/c", "mailto:x@a.b"],
)
def test_an_address_has_pairs_of_brackets(page, address):
    show(page, f"([a]({address})).")
    assert page.run("return document.querySelector('#log a').getAttribute('href')") == address
    assert page.run("return document.getElementById('log').textContent") == "(a)."


@pytest.mark.parametrize("address", ["https://a.b/(c", "https://a.b/c d", "javascript:f()", "https://a.b/" + "(" * 3000 + ")"])
def test_what_is_not_the_address_of_a_page_is_shown_as_it_is(page, address):
    show(page, f"[a]({address})")
    assert page.run("return document.getElementById('log').textContent") == f"[a]({address})"
    assert page.run("return document.querySelector('#log a')") is None


def test_the_first_of_three_marks_ends_the_inner_emphasis(page):
    assert html(page, "***a***: b") == "<p><strong><em>a</em></strong>: b</p>"
    assert html(page, "**a *b***") == "<p><strong>a <em>b</em></strong></p>"
    assert html(page, "***a*** and ***b***") == "<p><strong><em>a</em></strong> and <strong><em>b</em></strong></p>"
    assert html(page, "**a** *b*, **c**") == "<p><strong>a</strong> <em>b</em>, <strong>c</strong></p>"


def test_the_button_that_copies_keeps_its_name(page):
    said = """return import("/page/markdown.js").then(async ({ copy }) => {
        const [button, after] = [document.createElement("button"), []];
        window.setTimeout = (call) => after.push(call);
        await copy("x", button);
        await copy("x", button);
        after.forEach((call) => call());
        return button.textContent;
    })"""
    assert page.run(said) == "Copy"


def test_times_are_rounded_before_they_are_split(page):
    told = "return import('/page/shared.js').then(({ duration }) => arguments[0].map(duration))"
    times = {9.96: "10 ms", 63: "63 ms", 999.7: "1.00 s", 9996: "10.0 s", 59_960: "1 min 0 s", 119_600: "2 min 0 s"}
    assert page.run(told, list(times)) == list(times.values())
