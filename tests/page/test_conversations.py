"""The conversations that the page keeps: the list, branches, and answers that were interrupted."""

from __future__ import annotations

import json

import pytest

from support.page.browser import ENTER, ESCAPE
from support.page.chatting import ask, complete, kept, last_request, press, shown, watch_requests
from support.page.servers import speaking
from support.server.harness import wait_until

TITLES = "return Array.from(document.querySelectorAll('#conversations .title'), (one) => one.innerText)"
SAVED = """
    URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved = text; }); return "#saved"; };
    HTMLAnchorElement.prototype.click = function () { window.savedAs = this.download; };
"""


def converse(page, *questions) -> None:
    """Have a conversation for each question."""
    for question in questions:
        press(page, "New chat")
        ask(page, question)
        complete(page)


def test_conversations_are_listed_and_kept_until_they_are_deleted(page):
    converse(page, "About rivers", "About lakes")
    assert page.run(TITLES) == ["About lakes", "About rivers"]
    page.open(page.server.url)
    page.wait_text(".question .text", "About lakes")
    press(page, "About rivers")
    page.wait_text(".question .text", "About rivers")
    press(page, "Delete")
    assert len(kept(page)) == 2
    press(page, "Really delete")
    assert [shown(one)[0][1] for one in kept(page)] == ["About lakes"]
    assert "Ask the model" in page.text("#log")
    page.open(page.server.url)
    assert page.run(TITLES) == ["About lakes"]


def test_an_unfinished_deletion_is_taken_back_when_the_focus_leaves(page):
    converse(page, "About rivers")
    press(page, "Delete")
    page.click("#prompt")
    press(page, "Delete")
    assert len(kept(page)) == 1


def test_the_search_looks_into_titles_and_messages(page):
    converse(page, "About rivers", "About lakes")
    page.server.says[0] = "The deepest is Baikal."
    ask(page, "And more?")
    page.wait_text(".answer > .text", "Baikal")
    for wanted, titles in (("baikal", ["About lakes"]), ("RIVERS", ["About rivers"]), ("sea", [])):
        page.type("#search", wanted)
        assert page.run(TITLES) == titles
    assert page.text("#none-found") == "No conversation contains this."


def test_a_conversation_is_renamed(page):
    converse(page, "About rivers")
    press(page, "Rename")
    page.press("Water" + ENTER)
    assert page.run(TITLES) == ["Water"]
    assert page.focused() == "Water"
    press(page, "Rename")
    page.press("Fire" + ESCAPE)
    assert page.run(TITLES) == ["Water"]
    page.open(page.server.url)
    assert page.run(TITLES) == ["Water"]


def test_a_name_is_given_up_when_another_conversation_is_opened(page):
    converse(page, "About rivers", "About lakes")
    press(page, "Rename")
    page.press("Water")
    press(page, "About rivers")
    assert page.run(TITLES) == ["About lakes", "About rivers"]
    assert page.text("#conversations [aria-current]") == "About rivers"


def test_a_conversation_is_exported(page):
    converse(page, "About rivers?")
    page.run(SAVED)
    press(page, "Export as Markdown")
    text = "# About rivers?\n\n## You\n\nAbout rivers?\n\n## Answer\n\nHello, reader.\n"
    assert page.until("return window.saved") == text
    assert page.run("return window.savedAs") == "About-rivers.md"
    page.run("window.saved = null")
    press(page, "Export as JSON")
    assert shown(json.loads(page.until("return window.saved"))) == [("user", "About rivers?"), ("assistant", "Hello, reader.")]


FULL = """
    const usual = Storage.prototype.setItem;
    Storage.prototype.setItem = function (...entry) {
      if (this === localStorage) throw new DOMException("full", "QuotaExceededError");
      usual.apply(this, entry);
    };
"""


def test_a_full_browser_is_told(page):
    page.run(FULL)
    ask(page)
    page.wait_text(".answer .tools", "Regenerate")
    page.wait_text("#status", "no room to keep")
    assert kept(page) == []


def test_a_full_browser_is_told_of_a_name_that_it_does_not_keep(page):
    converse(page, "About rivers")
    page.run(FULL)
    press(page, "Rename")
    page.press("Water" + ENTER)
    page.wait_text("#status", "no room to keep")
    page.click("#theme")
    assert page.text("#theme") == "Light theme"


def test_the_page_works_where_it_may_keep_nothing(page):
    script = """
        for (const name of ["localStorage", "sessionStorage"]) {
          Object.defineProperty(window, name, {get() { throw new DOMException("forbidden", "SecurityError"); }});
        }
    """
    with page.before_pages(script):
        page.open(page.server.url)
        page.click("#theme")
        assert page.text("#theme") == "Light theme"
        converse(page, "About rivers")
        assert page.run(TITLES) == ["About rivers"]


def test_a_conversation_of_another_tab_is_listed(page):
    converse(page, "About rivers")
    page.run("""
        const said = {role: "user", content: "x", next: [], chosen: 0};
        const other = {id: "other", title: "Elsewhere", changedMs: 1, next: [said], chosen: 0};
        localStorage.setItem("penstock.conversation.other", JSON.stringify(other));
        dispatchEvent(new StorageEvent("storage", {key: "penstock.conversation.other"}));
    """)
    assert page.run(TITLES) == ["About rivers", "Elsewhere"]


def test_what_else_is_in_the_storage_does_no_harm(page):
    page.run("localStorage.setItem('penstock.conversation.x', '{'); localStorage.setItem('penstock.conversation.y', '7')")
    page.run("localStorage.setItem('penstock.settings', '{')")
    page.open(page.server.url)
    converse(page, "About rivers")
    assert page.run(TITLES) == ["About rivers"]


def test_an_edit_keeps_the_old_branch(page):
    ask(page, "First")
    complete(page)
    ask(page, "Second")
    page.until("return document.querySelectorAll('.answer .tools').length === 2")
    page.server.says[0] = "Another answer."
    page.click(".question:first-child .tools button")
    page.type(".edit textarea", "First, but better")
    page.press(ENTER)
    page.wait_text(".answer > .text", "Another answer")
    complete(page)
    assert "2/2" in page.text(".question .tools")
    press(page, "Version before")
    old = [("user", "First"), ("assistant", "Hello, reader."), ("user", "Second"), ("assistant", "Hello, reader.")]
    assert shown(kept(page)[0]) == old
    assert "1/2" in page.text(".question .tools")
    assert page.focused() == "›"
    page.open(page.server.url)
    assert page.run("return document.querySelectorAll('.answer').length") == 2
    press(page, "Version after")
    assert page.text(".question .text") == "First, but better"


def test_an_answer_that_was_made_anew_has_its_versions_below_it(page):
    ask(page)
    complete(page)
    for says in ("A second try.", "A third try."):
        page.server.says[0] = says
        press(page, "Regenerate")
        page.wait_text(".answer > .text", says)
        complete(page)
    assert "3/3" in page.text(".answer .tools")
    press(page, "Version before")
    press(page, "Version before")
    assert page.text(".answer > .text") == "Hello, reader."
    watch_requests(page)
    ask(page, "Why?")
    page.wait_text(".answer > .text", "A third try")
    assert [message["content"] for message in last_request(page)["messages"]] == ["What is a river?", "Hello, reader.", "Why?"]


def test_an_interrupted_answer_survives_a_reload_and_goes_on(browser):
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        ask(browser)
        server.gate.allow(6)
        browser.wait_text(".answer > .text", "^Hello")
        browser.open(server.url)
        browser.wait_text(".facts-line", "interrupted")
        begun = browser.text(".answer > .text")
        assert begun.startswith("Hello")
        assert begun != "Hello, reader."
        server.gate.open()
        server.says[0] = " And so on."
        watch_requests(browser)
        press(browser, "Continue")
        assert complete(browser) == f"{begun} And so on."
        sent = last_request(browser)
        assert sent["continue_final_message"]
        assert sent["messages"][-1] == {"role": "assistant", "content": begun}
        assert "interrupted" not in browser.text(".facts-line")
        assert shown(kept(browser)[0])[1] == ("assistant", f"{begun} And so on.")


def test_an_answer_before_its_first_token_can_be_asked_for_again_after_a_reload(browser):
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        ask(browser)
        browser.find("#stop")
        browser.open(server.url)
        server.gate.open()
        press(browser, "Try again")
        assert complete(browser) == "Hello, reader."
        assert len(kept(browser)[0]["next"][0]["next"]) == 1


def test_what_followed_an_empty_answer_stays_when_another_is_asked_for(browser):
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        ask(browser, "First")
        browser.click("#stop")
        browser.wait_text(".facts-line", "stopped")
        server.gate.open()
        ask(browser, "Second")
        complete(browser)
        browser.click(".answer .tools button:last-of-type")
        browser.until("return document.querySelectorAll('.answer').length === 1")
        complete(browser)
        press(browser, "Version before")
        assert shown(kept(browser)[0]) == [
            ("user", "First"),
            ("assistant", ""),
            ("user", "Second"),
            ("assistant", "Hello, reader."),
        ]


def test_an_answer_goes_on_while_another_conversation_is_open(browser):
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        ask(browser, "About rivers")
        server.gate.allow(6)
        browser.wait_text(".answer > .text", "^Hello")
        press(browser, "New chat")
        browser.wait_text("#conversations", "About rivers\nis being answered")
        assert not browser.run("return document.getElementById('send').hidden")
        server.gate.open()
        browser.until("return !document.getElementById('conversations').innerText.includes('answered')")
        press(browser, "About rivers")
        assert browser.text(".answer > .text") == "Hello, reader."


def test_answers_leave_the_browser_a_connection_to_the_server(browser):
    with speaking("Hello.", is_open=False) as server:
        browser.open(server.url)
        for number in range(6):
            press(browser, "New chat")
            ask(browser, f"Question {number}")
        browser.wait_text("#status", "^5 answers are on their way")
        assert browser.run("return document.getElementById('prompt').value") == "Question 5"
        browser.click("nav a[href='#live']")
        browser.wait_text("#figures", "Running\n")
        browser.click("nav a[href='#chat']")
        server.gate.open()
        browser.until("return !document.getElementById('conversations').innerText.includes('answered')")
        browser.click("#send")
        assert complete(browser) == "Hello."


OTHER_TAB = """
    const has = (key) => key.startsWith("penstock.conversation.") && localStorage.getItem(key).includes("About rivers");
    const key = Object.keys(localStorage).find(has);
    const other = JSON.parse(localStorage.getItem(key));
    const change = (newValue) => {
      if (newValue) localStorage.setItem(key, newValue);
      else localStorage.removeItem(key);
      dispatchEvent(new StorageEvent("storage", {key}));
    };
"""


def test_what_another_tab_keeps_meanwhile_stays_beside_the_answer(browser):
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        ask(browser, "About rivers")
        server.gate.allow(6)
        browser.wait_text(".answer > .text", "^Hello")
        browser.run(
            OTHER_TAB + "other.chosen = other.next.push({role: 'user', content: 'About lakes', next: [], chosen: 0}) - 1;"
            "other.changedMs += 1; change(JSON.stringify(other));"
        )
        server.gate.open()
        complete(browser)
        assert browser.run(TITLES) == ["About rivers (copy)", "About lakes"]
        browser.open(server.url)
        assert browser.text(".answer > .text") == "Hello, reader."


GROW = (
    OTHER_TAB
    + """
    const message = other.next[0].next[0].next[0].next[0];
    message.content += arguments[0];
    message.facts = {requestId: "page-1", end: "interrupted", aliveMs: Date.now() - (arguments[1] ?? 0)};
    other.changedMs += 1;
    change(JSON.stringify(other));
    """
)
"""Has another tab add a text to the second answer, which is on its way there."""


def test_an_answer_of_another_tab_grows_beside_what_the_reader_does(page):
    page.server.says[0] = "\n\n".join(f"Line {number}." for number in range(60))
    converse(page, "About rivers")
    page.server.says[0] = "Begun."
    ask(page, "And lakes?")
    page.until("return document.querySelectorAll('.answer .tools').length === 2")
    page.run(GROW, "")
    page.wait_text(".answer .foot", "^Is being answered in another tab.$")
    page.click(".answer .tools button")
    page.wait_text(".why", "Took")
    page.run("document.getElementById('log').scrollTop = 100")
    page.run(GROW, " And more.")
    assert page.run("return Array.from(document.querySelectorAll('.answer > .text')).at(-1).innerText") == "Begun. And more."
    assert page.run("return [document.getElementById('log').scrollTop, document.querySelector('.why').hidden]") == [100, False]
    assert page.focused() == "Why was this slow?"
    assert "is being answered" in page.text("#conversations")
    assert page.run("return document.getElementById('log').ariaBusy") == "true"


@pytest.mark.parametrize("is_open", [True, False])
def test_a_deletion_can_be_finished_while_an_answer_of_another_tab_grows(page, is_open):
    converse(page, "About rivers")
    ask(page, "And lakes?")
    page.until("return document.querySelectorAll('.answer .tools').length === 2")
    page.run(GROW, "")
    if not is_open:
        converse(page, "About seas")
    press(page, "Delete")
    page.run(GROW, " And more.")
    assert page.focused() == "Really delete"
    press(page, "Really delete")
    assert len(kept(page)) == 1 - is_open


def test_a_conversation_that_grew_in_another_tab_is_opened_as_it_is_now(page):
    converse(page, "About rivers")
    ask(page, "And lakes?")
    page.until("return document.querySelectorAll('.answer .tools').length === 2")
    page.run(GROW, "")
    press(page, "New chat")
    page.run(GROW, " And more.")
    press(page, "About rivers")
    assert page.run("return Array.from(document.querySelectorAll('.answer > .text')).at(-1).innerText").endswith(" And more.")


@pytest.mark.parametrize("edits", [False, True])
def test_an_answer_of_a_tab_that_is_gone_can_be_continued(page, edits):
    converse(page, "About rivers")
    ask(page, "And lakes?")
    page.until("return document.querySelectorAll('.answer .tools').length === 2")
    page.run(GROW, "", 66_000)  # with 70 s the tab counts as gone
    page.wait_text(".answer .foot", "Is being answered in another tab")
    if edits:
        press(page, "Edit")
        page.until("return !document.getElementById('conversations').innerText.includes('answered')")
        press(page, "Cancel")
    page.wait_text(".answer:last-child .tools", "Continue")
    assert "is being answered" not in page.text("#conversations")


def test_a_growing_answer_is_kept_where_the_timers_of_a_hidden_page_are_slow(browser):
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        browser.run("""
            const usual = Date.now;
            window.lateMs = 0;
            Date.now = () => usual() + window.lateMs;
            window.setInterval = () => 0;
        """)
        ask(browser)
        server.gate.allow(6)
        browser.wait_text(".answer > .text", "^Hello")
        browser.run("window.lateMs = 2500")
        server.gate.allow(1)
        browser.until("return Object.values(localStorage).some((text) => text.includes('Hello'))")
        server.gate.open()
        browser.wait_text(".answer .foot", "tokens")


def test_a_conversation_that_another_tab_deletes_ends_its_answer(browser):
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        ask(browser, "About rivers")
        server.gate.allow(6)
        browser.wait_text(".answer > .text", "^Hello")
        browser.run(OTHER_TAB + "change(null);")
        browser.find("#send")
        server.gate.open()
        wait_until(lambda: server.runtime.engine.load().num_running == 0)
        assert kept(browser) == []


def test_an_edit_ends_with_the_conversation_that_another_tab_deletes(browser):
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        ask(browser, "About rivers")
        server.gate.allow(6)
        browser.wait_text(".answer > .text", "^Hello")
        press(browser, "Edit")
        browser.run(OTHER_TAB + "change(null);")
        browser.find("#send")
        assert "Ask the model" in browser.text("#log")
        assert browser.run("return document.getElementById('prompt').value") == ""
        server.gate.open()
        ask(browser, "About lakes")
        complete(browser)
        assert browser.run(TITLES) == ["About lakes"]


def test_the_words_of_an_edit_outlive_the_conversation_that_another_tab_deletes(page):
    converse(page, "About rivers")
    page.click(".question .tools button")
    page.press(" and lakes")
    page.run(OTHER_TAB + "change(null);")
    assert "Ask the model" in page.text("#log")
    assert page.run("return document.getElementById('prompt').value") == "About rivers and lakes"


def test_a_name_is_given_to_what_another_tab_kept_meanwhile(page):
    converse(page, "About rivers")
    press(page, "Rename")
    page.run(OTHER_TAB + "other.changedMs += 1; change(JSON.stringify(other));")
    page.press("Water" + ENTER)
    assert page.run(TITLES) == ["Water"]
    page.open(page.server.url)
    assert page.run(TITLES) == ["Water"]


def test_an_edit_stays_when_another_tab_keeps_the_conversation(page):
    converse(page, "About rivers")
    page.click(".question .tools button")
    page.press(" and lakes")
    page.run(OTHER_TAB + "other.changedMs += 1; other.title = 'Water'; change(JSON.stringify(other));")
    assert page.run(TITLES) == ["Water"]
    page.press(ENTER)
    page.wait_text(".question .text", "About rivers and lakes")
    complete(page)
    assert page.run(TITLES) == ["About rivers and lakes (copy)", "Water"]


def test_deleting_a_conversation_ends_its_answer(browser):
    with speaking("Hello, reader.", is_open=False) as server:
        browser.open(server.url)
        ask(browser, "About rivers")
        server.gate.allow(6)
        browser.wait_text(".answer > .text", "^Hello")
        press(browser, "Delete")
        press(browser, "Really delete")
        server.gate.open()
        browser.find("#send")
        ask(browser, "About lakes")
        complete(browser)
        assert [shown(one)[0][1] for one in kept(browser)] == ["About lakes"]
