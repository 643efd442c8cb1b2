"""The chat of the page at `/`, in a browser."""

from __future__ import annotations

import json
from functools import partial

import pytest

from penstock.admission.door import AdmissionLimits
from penstock.config import ServerConfig
from support.page.browser import ENTER, ESCAPE, TAB
from support.page.chatting import ask, complete, kept, last_request, press, shown, watch_requests
from support.page.servers import speaking
from support.server.harness import EMBEDDER, make_text_runtime, wait_until

MARKDOWN = """# Rivers

The **Rhine** is *long*, `1233 km`:

1. Basel
2. Bonn
   - old **town**

| river | km |
|---|---|
| Rhine | 1233 |

```python
def add(a, b):
    return a < b  # **not bold**
```

> A quote. See [its page](https://example.org/rhine)."""

ATTACK = """<img src=x onerror="window.hacked=1"> <script>window.hacked=1</script>

[a](javascript:window.hacked=1) **<b onclick="x">bold</b>** `<i>code</i>`

| <u>head</u> | x |
|---|---|
| <iframe src="/"></iframe> | y |

```<b>
</code></pre><script>window.hacked=1</script>
```"""


def test_an_answer_streams_in_with_its_figures(browser):
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        ask(browser)
        browser.find("#stop")
        server.gate.allow(6)
        browser.wait_text(".answer > .text", "^Hello")
        assert "reader" not in browser.text(".answer > .text")
        server.gate.open()
        assert complete(browser) == "Hello, reader."
        figures = browser.text(".facts-line")
        for part in (r"\d+ tokens/s", r"first token after [\d.]+ m?s", "15 tokens", "toy"):
            browser.wait_text(".facts-line", part)
        assert "stopped" not in figures
        assert browser.text("#status") == "The answer is complete: 15 tokens."


def test_a_waiting_request_says_for_what_it_waits(browser):
    with speaking("Hello.", is_open=False) as server:
        browser.open(server.url)
        ask(browser)
        browser.wait_text(".answer .note", "Has waited|Waited")
        server.gate.open()
        assert complete(browser) == "Hello."


def test_markdown_becomes_elements(page):
    page.server.says[0] = MARKDOWN
    ask(page)
    complete(page)
    expected = {
        "h2": "Rivers",
        "p > strong": "Rhine",
        "p > em": "long",
        "p > code": "1233 km",
        "ol > li": "Basel",
        "ol > li > ul > li > strong": "town",
        "th": "river",
        "tbody td:last-child": "1233",
        "figure.code figcaption span": "python",
        "pre > code": "def add(a, b):\n    return a < b  # **not bold**",
        "blockquote a[href='https://example.org/rhine'][rel~=noopener]": "its page",
    }
    assert {selector: page.text(f".answer > .text {selector}") for selector in expected} == expected


def test_what_a_model_writes_is_shown_and_not_run(page):
    page.server.says[0] = ATTACK
    ask(page, "<img src=x onerror='window.hacked=1'>")
    text = complete(page)
    for part in (
        '<img src=x onerror="window.hacked=1">',
        "<script>",
        "[a](javascript:",
        "<i>code</i>",
        "<iframe",
        "</code></pre>",
    ):
        assert part in text
    assert page.run("return window.hacked ?? null") is None
    assert (
        page.run("return document.querySelectorAll('#log :is(img, script, iframe, b, u, i, [onclick], [onerror], a)').length")
        == 0
    )
    assert page.text(".question .text").startswith("<img")
    page.open(page.server.url)  # from what the browser kept
    assert page.run("return [window.hacked ?? null, document.querySelectorAll('#log :is(img, script)').length]") == [None, 0]


def test_the_policy_forbids_html_of_strings(page):
    for attempt in ("document.body.innerHTML = '<b>x</b>'", "document.body.setAttribute('onclick', 'window.hacked = 1')"):
        assert page.run(f"try {{ {attempt}; return 'done' }} catch (error) {{ return error.name }}") == "TypeError"
    assert [message for message in page.complaints() if "Trusted" not in message] == []


def test_stopping_keeps_what_was_said(browser):
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        ask(browser)
        server.gate.allow(6)
        browser.wait_text(".answer > .text", "^Hello")
        browser.click("#stop")
        browser.wait_text("#status", "Stopped")
        browser.wait_text(".facts-line", "stopped")
        server.gate.open()
        wait_until(lambda: server.runtime.engine.load().num_running == 0)
        assert browser.text(".answer > .text").startswith("Hello")
        assert browser.text(".answer > .text") != "Hello, reader."
        assert browser.focused() == "prompt"
        browser.wait_text(".facts-line", r"\d+ tokens? · stopped")
        assert kept(browser)[0]["next"][0]["next"][0]["facts"]["tokens"] > 0


def test_a_question_that_was_stopped_before_its_answer_joins_the_next_one(browser):
    """Some templates refuse two messages of one role in a row."""
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        ask(browser, "What is a river?")
        browser.click("#stop")
        browser.wait_text("#status", "Stopped")
        server.gate.open()
        watch_requests(browser)
        ask(browser, "And a lake?")
        complete(browser)
        assert last_request(browser)["messages"] == [{"role": "user", "content": "What is a river?\n\nAnd a lake?"}]
        ask(browser, "And a sea?")
        browser.until("return JSON.parse(window.sent).messages.length === 3")
        assert [message["role"] for message in last_request(browser)["messages"]] == ["user", "assistant", "user"]
        browser.until("return document.querySelectorAll('.answer .tools').length === 3")


HUNG = """
    const [usual, limit] = [window.fetch, AbortSignal.timeout];
    const [paths, limitMs, begins] = arguments;
    AbortSignal.timeout = () => limit.call(AbortSignal, limitMs);
    window.asked = 0;
    window.fetch = async (path, options) => {
      if (!paths.some((one) => path.startsWith(one))) return usual(path, options);
      window.asked += 1;
      const late = new Promise((_, reject) => options.signal.addEventListener("abort", () => reject(options.signal.reason)));
      return begins ? new Response(new ReadableStream({ start: () => late })) : late;
    };
"""


def test_stopping_does_not_wait_for_a_server_that_hangs(browser):
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        ask(browser)
        server.gate.allow(6)
        browser.wait_text(".answer > .text", "^Hello")
        browser.run(HUNG, ["v1/requests"], 1_000_000)
        browser.click("#stop")
        browser.wait_text("#status", "Stopped")
        server.gate.open()


@pytest.mark.parametrize(("path", "begins"), [("load", False), ("load", True), ("metrics", True)])
def test_the_live_view_says_that_a_server_hangs(page, path, begins):
    page.run(HUNG, [path], 100, begins)
    page.click("nav a[href='#live']")
    page.wait_text("#live-status", "The server does not answer")
    asked = page.run("return window.asked")
    page.until("return window.asked > arguments[0]", asked)


def test_an_edited_message_is_answered_in_place_of_what_followed(page):
    ask(page, "First")
    complete(page)
    ask(page, "Second")
    page.wait_text("#status", "complete")
    page.until("return document.querySelectorAll('.answer').length === 2")
    page.server.says[0] = "Another answer."
    page.click(".question:first-child .tools button")
    assert page.run("return document.activeElement.value") == "First"
    page.type(".edit textarea", "First, but better")
    page.press(ENTER)
    page.wait_text(".answer > .text", "Another answer")
    complete(page)
    assert shown(kept(page)[0]) == [("user", "First, but better"), ("assistant", "Another answer.")]


def test_an_edit_can_be_given_up(page):
    ask(page, "First")
    complete(page)
    page.click(".question .tools button")
    page.press("x" + ESCAPE)
    assert page.text(".question .text") == "First"
    assert page.focused() == "Edit"


def test_escape_in_another_field_or_view_stops_no_answer(browser):
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        ask(browser)
        server.gate.allow(6)
        browser.wait_text(".answer > .text", "^Hello")
        for opened in (
            partial(press, browser, "Edit"),
            partial(press, browser, "Rename"),
            partial(browser.click, "#search"),
            partial(browser.run, "document.querySelector('#model').focus()"),
        ):
            opened()
            browser.press(ESCAPE)
        browser.click("nav a[href='#live']")
        browser.find("#live-view")
        browser.press(ESCAPE)
        server.gate.open()
        browser.click("nav a[href='#chat']")
        assert complete(browser) == "Hello, reader."


def test_escape_in_a_setting_stops_the_answer(browser):
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        ask(browser)
        browser.find("#stop")
        browser.click("#temperature")
        browser.press(ESCAPE)
        browser.wait_text("#status", "Stopped")
        server.gate.open()


def test_an_answer_is_made_anew(page):
    ask(page)
    complete(page)
    page.server.says[0] = "A second try."
    press(page, "Regenerate")
    page.wait_text(".answer > .text", "A second try")
    complete(page)
    assert shown(kept(page)[0]) == [("user", "What is a river?"), ("assistant", "A second try.")]


def test_settings_reach_the_request(page):
    page.type("#system", "Be brief.")
    page.type("#max_tokens", "5")
    page.type("#temperature", "0")
    page.type("#seed", "-3")
    page.type("#top_k", "40")
    page.type("#min_p", "0.05")
    watch_requests(page)
    ask(page)
    assert complete(page) == "Hello"
    page.wait_text(".facts-line", "cut at its limit")
    sent = last_request(page)
    assert (sent["temperature"], sent["seed"], sent["max_tokens"], sent["model"]) == (0, -3, 5, "toy")
    assert (sent["top_k"], sent["min_p"]) == (40, 0.05)
    assert "top_p" not in sent
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]


def test_a_chosen_model_is_remembered_where_no_list_came(page):
    page.run("document.getElementById('model').value = arguments[0]", "org/toy")
    page.type("#seed", "4" + TAB)
    script = """
        const usual = window.fetch;
        window.fetch = (path, options) => path === "v1/models" ? Promise.reject(new TypeError()) : usual(path, options);
        window.mend = () => { window.fetch = usual; };
    """
    with page.before_pages(script):
        page.open(page.server.url)
        page.wait_text("#status", "does not answer")
        page.type("#seed", "5" + TAB)
        page.run("window.mend()")
        ask(page)
        complete(page)
        page.until("return document.getElementById('model').value === 'org/toy'")


def test_a_setting_that_is_no_number_in_its_range_is_not_sent(page):
    page.type("#top_p", "7")
    ask(page)
    page.until("return document.activeElement.id === 'top_p'")
    assert page.run("return document.querySelectorAll('.question, .answer').length") == 0
    assert page.run("return document.getElementById('prompt').value") == "What is a river?"


@pytest.mark.parametrize("has_writer", [True, False])
def test_encoders_are_not_offered(browser, has_writer):
    """They have names in the list of models, and answer no chat."""
    encoder = make_text_runtime(served_names=("minilm",), aliases=())
    try:
        fields = {} if has_writer else {"encoder": EMBEDDER, "chat_template": None}
        with speaking("Hello.", others=(encoder,), **fields) as server:
            browser.open(server.url)
            names = "Array.from(document.querySelectorAll('#model option'), (one) => one.value).join()"
            told = "document.getElementById('no-model').checkVisibility()"
            browser.until(f"return {names} || {told}")
            assert browser.run(f"return {names}") == ("toy,org/toy" if has_writer else "")
            assert ("no model that writes text" in browser.text("#settings")) is not has_writer
            if has_writer:
                ask(browser)
                assert complete(browser) == "Hello."
    finally:
        encoder.close()


def test_an_encoder_that_was_loaded_for_a_chat_is_not_offered_any_more(page):
    page.run("""
        const usual = window.fetch;
        window.fetch = (path, options) => path !== "v1/models" ? usual(path, options)
          : Promise.resolve(Response.json({data: [{id: "toy", task: "embed", status: {value: "loaded"}}]}));
    """)
    page.server.runtime.engine.drain()
    ask(page)
    page.wait_text("#settings", "no model that writes text")
    assert [message for message in page.complaints() if "503" not in message] == []


def test_an_answer_follows_a_schema(page):
    page.type(
        "#schema",
        '{"type": "object", "properties": {"river": {"enum": ["Rhine"]}}, "required": ["river"], '
        '"additionalProperties": false}',
    )
    ask(page)
    complete(page)
    assert json.loads(page.text(".answer pre")) == {"river": "Rhine"}


def test_json_is_shown_as_it_is_and_not_as_markdown(page):
    answer = {"path": "C:\\*temp*\\__init__.py", "say": '"hi"', "cost": "$5 $x$"}
    page.type("#schema", json.dumps({"const": answer}))
    ask(page)
    complete(page)
    assert json.loads(page.text(".answer pre")) == answer
    page.open(page.server.url)
    assert json.loads(page.text(".answer pre")) == answer


def test_an_answer_that_follows_a_schema_goes_on_where_it_was_cut(page):
    page.type("#schema", '{"enum": ["The Rhine is a river."]}')
    page.type("#max_tokens", "9")
    ask(page)
    complete(page)
    assert page.text(".answer pre") == '"The Rhin'
    page.type("#max_tokens", "90")
    press(page, "Continue")
    complete(page)
    assert page.text(".answer pre") == '"The Rhine is a river."'


@pytest.mark.parametrize("is_json", [True, False])
def test_an_answer_is_drawn_as_what_it_began_as(page, is_json):
    """The reader may change the schema before the answer goes on."""
    schemas = ['{"enum": ["The __Rhine__ is a river."]}', ""]
    page.server.says[0] = "The **Rhine** is a river."
    page.type("#schema", schemas[not is_json])
    page.type("#max_tokens", "9")
    ask(page)
    complete(page)
    page.type("#schema", schemas[is_json])
    press(page, "Continue")
    complete(page)
    assert page.run("return document.querySelectorAll('.answer pre').length") == is_json


def test_a_schema_that_is_no_json_is_told_beside_it(page):
    page.type("#schema", '{"type": ')
    ask(page)
    page.wait_text("#schema-error", "This is not JSON")
    assert page.run("return [document.activeElement.id, document.getElementById('schema').ariaInvalid]") == ["schema", "true"]


def test_why_was_this_slow(page):
    ask(page)
    complete(page)
    page.click(".answer .tools button")
    page.wait_text(".why", r"Took [\d.]+ m?s in all\.")
    panel = page.text(".why")
    for part in ("Computed its prompt of", "Prompt: ", "Tokens: 14 steps after the first", "Requests in its steps", "page-"):
        assert part in panel
    assert page.run("return document.querySelectorAll('.why .line .phase').length") >= 2
    assert "Wrote its tokens" in page.run("return document.querySelector('.why .line').ariaLabel")
    page.click(".answer .tools button")
    assert page.run("return document.querySelector('.why').hidden")


def test_a_route_that_held_the_answer_back_is_named_and_not_the_network(page):
    page.run("""
        const usual = window.fetch;
        window.fetch = async (path, options) => {
          const response = await usual(path, options);
          const chosen = {route: "auto", sources: "", check: "", held_ms: 80};
          return path.startsWith("v1/requests/") ? Response.json({...await response.json(), chosen}) : response;
        };
    """)
    ask(page)
    complete(page)
    press(page, "Why was this slow?")
    page.wait_text(".why", "here: the answer was held back until it was chosen")
    assert "network" not in page.text(".why")


AT_ONCE = """
    const [atOnce, later] = arguments;
    const send = (controller, events) => {
      const lines = events.map((event) => `data: ${JSON.stringify(event)}\\n\\n`);
      controller.enqueue(new TextEncoder().encode(lines.join("")));
    };
    const pieces = (texts) => texts.map((content) => ({choices: [{index: 0, delta: {content}}]}));
    window.fetch = async () => new Response(new ReadableStream({start(controller) {
      send(controller, pieces(atOnce));
      window.goOn = () => {
        send(controller, [...pieces(later), {choices: [], usage: {completion_tokens: 100}}]);
        controller.enqueue(new TextEncoder().encode("data: [DONE]\\n\\n"));
      };
    }}));
"""
"""Has the next answer come in two parts, the second one with `goOn`. It counts 100 tokens."""


def test_an_answer_that_came_at_once_has_no_rate(page):
    page.run(AT_ONCE, ["a", "b"], [])
    ask(page)
    page.wait_text(".answer > .text", "ab")
    page.run("window.goOn()")
    complete(page)
    page.wait_text(".facts-line", "^first token after .* 100 tokens")


def test_the_rate_leaves_out_what_came_with_the_first_token(page):
    page.run(AT_ONCE, ["a" * 50, "b" * 25], ["c" * 25])
    ask(page)
    page.wait_text(".answer > .text", "ab")
    page.run("window.goOn()")
    complete(page)
    decode_ms = kept(page)[0]["next"][0]["next"][0]["facts"]["decodeMs"]
    page.wait_text(".facts-line", f"^{25_000 / decode_ms:.0f} tokens/s")


def test_reasoning_is_folded_and_calls_are_shown(page):
    page.run("""
        const deltas = [{role: "assistant", content: ""}, {reasoning_content: "Let me "}, {reasoning_content: "think."},
          {content: "Done."}, {tool_calls: [{index: 0, id: "1", function: {name: "look", arguments: '{"at"'}}]},
          {tool_calls: [{index: 0, function: {arguments: ': "sea"}'}}]}];
        const events = deltas.map((delta) => `data: ${JSON.stringify({choices: [{index: 0, delta}]})}\\n\\n`).join("");
        window.fetch = async () => new Response(events + "data: [DONE]\\n\\n");
    """)
    ask(page)
    assert complete(page) == "Done."
    assert page.run("const one = document.querySelector('.answer details'); return [one.open, one.textContent]") == [
        False,
        "ReasoningLet me think.",
    ]
    assert page.text(".answer figure.code").startswith("Call of look")
    assert '{"at": "sea"}' in page.text(".answer figure.code")


def test_reasoning_is_sent_back_only_to_be_continued(page):
    """Servers behind a route may refuse the field."""
    page.run("""
        window.fetch = async (path, options) => {
          if (options.body) window.sent = options.body;
          const choices = [{index: 0, delta: {content: "Done.", reasoning_content: "Let me think."}, finish_reason: "length"}];
          return new Response(`data: ${JSON.stringify({choices})}\\n\\ndata: [DONE]\\n\\n`);
        };
    """)
    ask(page)
    assert complete(page) == "Done."
    press(page, "Continue")
    page.wait_text(".answer > .text", "Done.Done.")
    complete(page)
    asked, answered = last_request(page)["messages"]
    assert asked == {"role": "user", "content": "What is a river?"}
    assert answered == {"role": "assistant", "content": "Done.", "reasoning_content": "Let me think."}
    ask(page, "And then?")
    page.until("return document.querySelectorAll('.answer .tools').length === 2")
    assert last_request(page)["messages"][1] == {"role": "assistant", "content": "Done.Done."}


def test_reasoning_keeps_its_paragraphs_while_more_comes(page):
    page.run("""
        window.fetch = async () => new Response(new ReadableStream({start(controller) {
          window.reason = (text) => controller.enqueue(new TextEncoder().encode(
            `data: ${JSON.stringify({choices: [{index: 0, delta: {reasoning_content: text}}]})}\\n\\n`));
        }}));
    """)
    ask(page)
    page.until("return Boolean(window.reason)")
    page.run("window.reason('One.\\n\\nTwo')")
    page.until("return document.querySelectorAll('.answer details p').length === 2")
    page.run("window.first = document.querySelector('.answer details p'); window.reason(' and more')")
    page.until("return document.querySelector('.answer details').textContent.includes('more')")
    assert page.run("return window.first.isConnected")


def test_each_part_of_a_text_has_the_direction_of_its_script(page):
    page.server.says[0] = "مرحبا Rhine!\n\n- البند\n\nThe Rhine.\n\n```python\nx = 'نهر'\n```"
    ask(page, "ما هو النهر؟")
    complete(page)
    parts = "document.querySelectorAll('.question .text, .answer > .text > *')"
    directions = page.run(f"return Array.from({parts}, (one) => getComputedStyle(one).direction)")
    assert directions == ["rtl", "rtl", "rtl", "ltr", "ltr"]


def test_an_answer_that_could_not_go_on_says_why(page):
    page.type("#max_tokens", "5")
    ask(page)
    complete(page)
    page.run("window.fetch = () => Promise.reject(new TypeError());")
    press(page, "Continue")
    page.wait_text("#status", "The server does not answer.")
    assert page.text(".answer > .text") == "Hello"


def test_long_lines_are_shown_in_a_moment(page):
    page.run("""
        import("/page/markdown.js").then(({ MarkdownView }) => {
          const [many, begun] = [(text) => text.repeat(60000), performance.now()];
          for (const text of ["a|b\\n" + many("-") + "|x", "```" + many(" ") + "a`", "```" + many("a") + "`"]) {
            new MarkdownView(document.createElement("div")).show(text);
          }
          window.tookMs = performance.now() - begun;
        });
    """)
    assert page.until("return window.tookMs") < 5000


def test_a_refusal_is_told_with_its_remedy_and_can_be_tried_again(browser):
    with speaking("Hello.", limits=AdmissionLimits(max_queue=64)) as server:
        browser.open(server.url)
        server.runtime.engine.drain()
        ask(browser)
        browser.wait_text(".answer .error", r"\w+")
        browser.wait_text(".answer .tools", "Try again")
        assert [message for message in browser.complaints() if "503" not in message] == []


def tab_to(page, name, *, shift=False) -> None:
    """Press Tab until the element with this id, or text, has the focus."""
    for _ in range(40):
        if page.focused() == name:
            return
        page.press(TAB, shift=shift)
    raise AssertionError(f"the keyboard does not reach {name!r}")


def test_the_keyboard_is_enough(page):
    assert page.focused() == "prompt"
    page.press("Hi" + ENTER)
    complete(page)
    tab_to(page, "Why was this slow?", shift=True)
    page.press(ENTER)
    page.wait_text(".why", "Took")
    tab_to(page, "Regenerate")
    page.press(ENTER)
    page.wait_text("#status", "complete")
    tab_to(page, "seed")
    page.press("5" + ENTER)
    tab_to(page, "Live", shift=True)
    page.press(ENTER)
    page.find("#figures")
    assert page.run("return document.querySelector('nav a[aria-current]').innerText") == "Live"


def test_everything_that_can_be_used_has_a_name(page):
    ask(page)
    complete(page)
    script = """
        return Array.from(document.querySelectorAll("button, input, select, textarea, a, summary"))
          .filter((one) => one.checkVisibility() && !(one.innerText || one.ariaLabel || one.labels?.length))
          .map((one) => one.outerHTML)
    """
    assert page.run(script) == []


def test_the_theme_follows_the_system_or_the_switch(page):
    background = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    page.prefer("dark")
    page.until(f"{background.replace('return', 'return (')}) !== arguments[0]", light)
    dark = page.run(background)
    page.click("#theme")
    assert (page.text("#theme"), page.run(background)) == ("Light theme", light)
    page.open(page.server.url)
    assert (page.text("#theme"), page.run(background)) == ("Light theme", light)
    page.prefer("light")
    page.click("#theme")
    assert (page.text("#theme"), page.run(background)) == ("Dark theme", dark)


def test_a_narrow_screen_has_no_sideways_scrolling(page):
    formula = "$" + "+".join(f"x_{{{number}}}" for number in range(30)) + "$"
    page.server.says[0] = f"{MARKDOWN}\n\n{'wide' * 100}\n\nWide: {formula}\n\n- A list: {formula}"
    ask(page)
    complete(page)
    page.size(360, 640)
    page.until("return document.querySelectorAll('.answer math').length > 1")
    assert page.run("const log = document.getElementById('log'); return log.scrollWidth === log.clientWidth")
    for view in ("#chat", "#live"):
        page.run("location.hash = arguments[0]", view)
        assert page.run("return document.documentElement.scrollWidth") <= 360
    page.run("location.hash = '#chat'")
    page.click("#settings-button")
    page.find("#model")


def test_a_server_with_keys_asks_for_one_once(browser):
    config = ServerConfig(port=0, api_keys=("secret",), shutdown_timeout_s=0.0)
    with speaking("Hello.", config=config) as server:
        browser.open(server.url)
        for cut in ("k\u2026y", "sch\u00f6n"):
            browser.type("#key", cut)
            browser.press(ENTER)
            assert browser.run("return document.getElementById('key').matches('dialog[open] :invalid')")
        browser.type("#key", "wrong")
        browser.press(ENTER)
        browser.wait_text("#key-message", "wrong")
        browser.type("#key", "secret")
        browser.press(ENTER)
        browser.until("return document.getElementById('model').value === 'toy'")
        ask(browser)
        assert complete(browser) == "Hello."
        assert browser.run("return [sessionStorage.getItem('penstock.key'), localStorage.getItem('penstock.key')]") == [
            "secret",
            None,
        ]
        assert "secret" not in browser.run("return JSON.stringify(localStorage)")
        browser.click("#key-button")
        assert browser.run("return sessionStorage.getItem('penstock.key')") is None
        assert [message for message in browser.complaints() if "401" not in message] == []
