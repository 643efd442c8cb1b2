"""The live view of the page at `/`, in a browser."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import httpx

from penstock.admission.door import AdmissionLimits
from penstock.config import ServerConfig
from penstock.deploy.routes import Route
from support.cluster import cluster
from support.page.servers import speaking
from support.server.harness import LiveServer, make_runtime, wait_until

CELLS = "return document.querySelectorAll('#kv-map rect[class^=owner]').length"
METRICS = """
    const grows = Object.entries(arguments[0]);
    window.numAsked = 99;
    const usual = window.fetch;
    const sample = ([name, value]) => {
      const [plain, more] = name.split(/[{}]/);
      return `penstock_${plain}{${more ? `${more},` : ""}model="toy"} ${value * window.numAsked}`;
    };
    window.fetch = (path, options) => {
      if (path !== "metrics") return usual(path, options);
      window.numAsked += 1;
      return Promise.resolve(new Response(grows.map(sample).join("\\n")));
    };
    location.hash = "#live";
"""
"""Opens the live view on metrics that grow by `arguments[0]` with each reading."""


def ask(server, request_id, *, max_tokens=20) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": f"This is {request_id}."}], "max_tokens": max_tokens}
    headers = {"X-Request-Id": request_id}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=120)


@contextmanager
def asked(server, *request_ids):
    """Requests are on the way during the block."""
    threads = [threading.Thread(target=ask, args=(server, request_id)) for request_id in request_ids]
    for thread in threads:
        thread.start()
    load = server.runtime.engine.load
    try:
        # Those that came during a step join with the next one.
        wait_until(lambda: load().num_running + load().num_waiting == len(threads))
        server.gate.allow(1)
        wait_until(lambda: load().num_running == len(threads))
        yield
    finally:
        server.gate.open()
        for thread in threads:
            thread.join(120)


def figure(browser, name, pattern):
    """Wait until a figure says so."""
    script = "return Array.from(document.querySelectorAll('#figures > div'), (one) => one.innerText)"
    browser.until(f"{script}.some((one) => new RegExp(arguments[0]).test(one))", rf"^{name}\n{pattern}")


def test_a_running_request_is_a_lane_until_a_minute_after_its_end(browser):
    with speaking("A long answer.", is_open=False) as server:
        browser.open(f"{server.url}/#live")
        figure(browser, "Running", "0")
        assert "None in the last minute" in browser.text("#lanes-words")
        with asked(server, "first", "second"):
            server.gate.allow(4)
            figure(browser, "Running", "2")
            browser.wait_text("#lanes-words", "2 requests on the way")
            server.gate.allow(2)  # the first may have used up all four
            browser.until(
                "return Array.from(document.querySelectorAll('.lane .state')).every((one) => one.innerText === 'decode')"
            )
            browser.until(f"{CELLS} >= 2")
            colours = "return Array.from(document.querySelectorAll('.lane .chip'), (one) => one.className)"
            assert sorted(browser.run(colours)) == ["chip owner-0", "chip owner-1"]
            assert browser.run("return document.querySelectorAll('.lane .phase').length") >= 2
            browser.click("#lanes .lane")
            browser.wait_text(".lane-why:not([hidden])", "tokens so far")
        browser.wait_text("#lanes-words", "0 requests on the way")
        browser.wait_text(".lane-why:not([hidden])", "Took .* in all")
        labels = browser.run("return Array.from(document.querySelectorAll('#lanes .lane'), (one) => one.ariaLabel)")
        assert len(labels) == 2
        assert all(", ended, " in label and "15 out" in label for label in labels)


def test_rates_and_latencies_are_those_since_it_looked(browser):
    with speaking("A long answer.") as server:
        ask(server, "before")
        browser.open(f"{server.url}/#live")
        figure(browser, "First token", "–")
        for number in range(3):
            ask(server, f"after-{number}")
        figure(browser, "First token", r"[\d.]+ m?s\np95 [\d.]+ m?s · p99 [\d.]+ m?s")
        figure(browser, "Between tokens", r"[\d.]+ m?s\n")
        figure(browser, "Tokens per second", "[1-9]")
        browser.until("return document.querySelectorAll('#batches-chart rect.bar-decode').length > 0")
        assert "generated" in browser.run("return document.getElementById('tokens-chart').ariaLabel")
        assert "512 blocks of 16 tokens" in browser.run("return document.getElementById('kv-map').ariaLabel")


def test_wrong_guesses_are_no_tokens_of_prompts(browser):
    """Each step computes 10 positions: 2 rows and 8 guesses. 3 guesses are right."""
    with speaking("Hello.") as server:
        browser.open(server.url)
        browser.run(
            METRICS,
            {"batch_tokens_count": 1, "batch_tokens_sum": 10, "batch_size_sum": 2, "generation_tokens_total": 5}
            | {"guessed_tokens_total": 8, "accepted_tokens_total": 3},
        )
        browser.wait_text("#batches-words", "of 2.0 requests: 5.0 decoded tokens and 0.0 of prompts")


def test_readings_begin_anew_after_a_restart_of_the_server(browser):
    with speaking("Hello.") as server:
        browser.open(server.url)
        buckets = {'{le="0.01"}': 0, '{le="0.1"}': 9, '{le="+Inf"}': 10}
        browser.run(METRICS, {f"time_to_first_token_seconds_bucket{edge}": number for edge, number in buckets.items()})
        figure(browser, "First token", r"[\d.]+ ms")
        browser.run("window.numAsked = 0")
        browser.until("return window.numAsked > 1")  # so the first of these readings is shown
        assert "Infinity" not in browser.text("#figures")
        figure(browser, "First token", r"[\d.]+ ms")


def test_refusals_are_told_by_their_reason(browser):
    with speaking("Hello.", is_open=False, limits=AdmissionLimits(max_queue=1)) as server:
        browser.open(f"{server.url}/#live")
        browser.wait_text("#refusals", "none")
        threads = [threading.Thread(target=ask, args=(server, f"r{number}")) for number in range(68)]
        for thread in threads:
            thread.start()
        browser.wait_text("#refusals", r"queue\D+[1-9]")
        server.gate.open()
        for thread in threads:
            thread.join(120)


def test_several_models_are_listed_and_one_is_chosen(browser):
    other = make_runtime(served_names=("other",), aliases=())
    try:
        with speaking("Hello.", others=(other,)) as server:
            browser.open(f"{server.url}/#live")
            browser.wait_text("#models", r"toy[\s\S]*other")
            browser.run(
                "const one = document.getElementById('live-model'); one.value = 'other'; one.dispatchEvent(new Event('change'))"
            )
            browser.until("return performance.getEntriesByType('resource').some((one) => one.name.endsWith('/kv?model=other'))")
            figure(browser, "Running", "0")
    finally:
        other.close()


def test_a_model_that_is_not_served_any_more_gives_way(browser):
    with speaking("Hello.") as server:
        browser.open(f"{server.url}/#live")
        figure(browser, "Running", "0")
        browser.run("""
            const one = document.getElementById("live-model");
            one.replaceChildren(new Option("gone"));
            one.dispatchEvent(new Event("change"));
        """)
        browser.until("return document.getElementById('live-model').value === 'toy'")
        browser.wait_text("#live-status", "^$")


def test_the_figures_leave_no_empty_tile(browser):
    """The lines between them are their background, which an empty place in the last row would show."""
    with speaking("Hello.") as server:
        browser.open(f"{server.url}/#live")
        figure(browser, "Full", "")
        for width in (320, 390, 700, 1280):
            browser.size(width, 844)
            edges = browser.run("""
                const right = (one) => Math.round(one.getBoundingClientRect().right);
                return [right(document.querySelector("#figures > div:last-child")), right(document.getElementById("figures"))];
            """)
            assert edges[0] == edges[1] - 1, width  # its border


def test_charts_stand_side_by_side_and_the_last_panel_is_as_wide_as_both(browser):
    with speaking("Hello.") as server:
        browser.open(f"{server.url}/#live")
        browser.wait_text("#refusals", "none")
        tokens, batches, refusals = browser.run("""
            return ["tokens", "batches", "refusals"].map((name) =>
              document.querySelector(`[aria-labelledby="${name}-title"]`).getBoundingClientRect().toJSON());
        """)
        assert tokens["y"] == batches["y"]
        assert (refusals["x"], refusals["right"]) == (tokens["x"], batches["right"])


def test_the_map_has_a_cell_for_each_block_of_the_pool(browser):
    """512 blocks are four full rows: the null block is not among them."""
    with speaking("Hello.") as server:
        browser.open(f"{server.url}/#live")
        browser.find("#kv-map rect")
        widths = "return Array.from(document.querySelectorAll('#kv-map rect'), (one) => one.width.baseVal.value)"
        assert sum(browser.run(widths)) == 512


def test_nobody_who_looks_costs_nothing(browser):
    """Neither behind another tab nor beside the chat does it ask."""
    with speaking("Hello.") as server:
        browser.open(f"{server.url}/#live")
        figure(browser, "Running", "0")
        asked_of = "return performance.getEntriesByType('resource').filter((one) => /load|metrics|kv/.test(one.name)).length"
        hide = "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true})"
        tell = "document.dispatchEvent(new Event('visibilitychange'))"
        for leave, come_back in (
            (f"{hide}; {tell}".replace("arguments[0]", "true"), f"{hide}; {tell}".replace("arguments[0]", "false")),
            ("location.hash = '#chat'", "location.hash = '#live'"),
        ):
            browser.run(leave)
            browser.run("window.left = Date.now()")
            browser.until("return Date.now() - window.left > 1100")  # what was under way has ended
            number = browser.run(asked_of)
            browser.until("return Date.now() - window.left > 2500")
            assert browser.run(asked_of) == number
            browser.run(come_back)
            browser.until(f"{asked_of} > arguments[0]", number)


def test_a_server_that_is_gone_is_told(browser):
    with speaking("Hello.") as server:
        browser.open(f"{server.url}/#live")
        figure(browser, "Running", "0")
        server.stop()
        browser.wait_text("#live-status", "The server does not answer")
        assert [message for message in browser.complaints() if "ERR_" not in message] == []


def test_under_a_key_it_asks_once_and_goes_on(browser):
    config = ServerConfig(port=0, api_keys=("secret",), shutdown_timeout_s=0.0)
    with speaking("Hello.", config=config) as server:
        browser.open(f"{server.url}/#live")
        browser.find("#key")
        browser.press("\ue00c")
        browser.wait_text("#live-status", "key")
        browser.click("#live-again")
        browser.type("#key", "secret\ue007")
        figure(browser, "Running", "0")
        assert browser.text("#live-status") == ""
        assert [message for message in browser.complaints() if "401" not in message] == []


def test_a_key_for_a_route_alone_is_told_why_nothing_is_shown(browser, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "ann"\nkey = "secret"\nmodels = ["auto"]\n')
    config = ServerConfig(port=0, api_keys_file=str(keys), shutdown_timeout_s=0.0)
    other = make_runtime(served_names=("other",), aliases=())
    routes = {"routes": [Route(name="auto", models=("toy", "other"))]}
    try:
        with speaking("Hello.", config=config, others=(other,), more=routes) as server:
            browser.open(f"{server.url}/#live")
            browser.type("#key", "secret\ue007")
            browser.wait_text("#live-status", "allows no model by its own name")
            assert [message for message in browser.complaints() if "401" not in message] == []
    finally:
        other.close()


def test_a_cluster_shows_its_replicas_in_place_of_one_cache(browser):
    with cluster() as made:
        browser.open(f"{made.server.url}/#live")
        browser.wait_text("#replicas", "r0")
        browser.wait_text("#replicas", "r1")
        assert browser.run("return getComputedStyle(document.querySelector('#kv-panel')).display") == "none"


def test_batches_are_listed_with_their_progress(browser, tmp_path):
    runtime = make_runtime()
    lines = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 3}}\n'
    with LiveServer(runtime, ServerConfig(port=0, jobs_dir=str(tmp_path / "jobs"))) as server:
        browser.open(f"{server.url}/#live")
        figure(browser, "Running", "0")
        assert not browser.run("return document.querySelector('#jobs-panel').checkVisibility()")
        form = {"files": {"file": ("in.jsonl", lines)}, "data": {"purpose": "batch"}}
        file = httpx.post(f"{server.url}/v1/files", **form).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
        httpx.post(f"{server.url}/v1/batches", json=asked).raise_for_status()
        browser.wait_text("#jobs", r"completed\s+1 of 1\s+0\s+1\s+0 %\s+3\s+–")
    runtime.close()
