"""The pictures in the docs: the page of a server with the default model. `make test-page` has them written."""

from __future__ import annotations

import io
import os
import random
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from PIL import Image

from support.e2e.process import serving
from support.page.browser import ENTER

FOLDER = os.environ.get("PENSTOCK_PICTURES")
QUESTION = "Write a Python function that adds two numbers, without explanation."
NUM_CLIENTS = 12
WATCHED_S = 45
MAX_BYTES = 150_000


def write(browser, name) -> None:
    """Write a PNG with a palette, which is a quarter of the size of the browser's."""
    with Image.open(io.BytesIO(browser.picture())) as image, io.BytesIO() as small:
        image.convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            small, "PNG", optimize=True
        )
        assert small.tell() < MAX_BYTES
        (Path(FOLDER) / name).write_bytes(small.getvalue())


@contextmanager
def traffic(url):
    """Clients who ask one after the other during the block."""
    is_over = threading.Event()

    def ask(number) -> None:
        draw = random.Random(number)
        while not is_over.is_set():
            prompt = f"Tell me about river {draw.randrange(99)}. " * draw.randrange(1, 40)
            body = {"prompt": prompt, "max_tokens": draw.randrange(40, 300), "ignore_eos": True}
            headers = {"X-Request-Id": f"river-{number}-{draw.randrange(1000)}"}
            httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=300)
            is_over.wait(draw.random() * 2)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.mark.skipif(FOLDER is None, reason="PENSTOCK_PICTURES names no folder, as `make test-page` does")
@pytest.mark.timeout(600)
def test_pictures(browser, weights, tmp_path):
    with serving(tmp_path, "--kv-cache-memory", "40MiB", "--max-num-seqs", "8") as server:
        browser.size(1200, 960)
        browser.open(server.url)
        browser.type("#temperature", "0")
        browser.type("#prompt", QUESTION + ENTER)
        browser.wait_text("#status", "complete")
        browser.click(".answer .tools button")
        browser.wait_text(".why", "Took")
        browser.run("document.activeElement.blur()")
        write(browser, "page-chat.png")
        browser.prefer("dark")
        browser.open("about:blank")
        with traffic(server.url):
            browser.open(f"{server.url}/#live")
            browser.until("return performance.now() > arguments[0]", WATCHED_S * 1000, timeout_s=2 * WATCHED_S)
            write(browser, "page-live.png")
