"""Talks with the chat of the page, and what the browser kept of it. For tests of this folder."""

from __future__ import annotations

import json
from typing import Any

from support.page.browser import ENTER, Browser

KEPT = "penstock.conversation."


def ask(browser: Browser, text: str = "What is a river?") -> None:
    browser.type("#prompt", text)
    browser.press(ENTER)


def complete(browser: Browser) -> str:
    """Return the last answer's text, once it is complete."""
    browser.wait_text("#status", "complete")
    text: str = browser.run("return Array.from(document.querySelectorAll('.answer > .text')).at(-1).innerText")
    return text


def press(browser: Browser, name: str) -> None:
    """Click the last button that is shown with this text or label."""
    script = """
        const all = Array.from(document.querySelectorAll("button")).filter((one) => one.checkVisibility());
        const found = all.filter((one) => [one.innerText, one.ariaLabel].includes(arguments[0])).at(-1);
        found?.focus();
        found?.click();
        return Boolean(found);
    """
    browser.until(script, name)


def watch_requests(browser: Browser) -> None:
    """Have the page remember the last body that it sends, for `last_request`."""
    browser.run("""
        const usual = window.fetch;
        window.fetch = (path, options) => { if (options?.body) window.sent = options.body; return usual(path, options); };
    """)


def last_request(browser: Browser) -> Any:
    return json.loads(browser.run("return window.sent"))


def kept(browser: Browser) -> list[dict[str, Any]]:
    """Return the conversations that the browser keeps."""
    script = f"return Object.entries(localStorage).filter(([key]) => key.startsWith('{KEPT}')).map(([_, text]) => text)"
    return [json.loads(text) for text in browser.run(script)]


def shown(conversation: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (role, content) of each message of the branch that is shown."""
    path, at = [], conversation
    while at["next"]:
        at = at["next"][at["chosen"]]
        path.append((at["role"], at["content"]))
    return path
