"""The chats that speculation is measured with, and what is made of the runs."""

import json

import pytest
import speculation
from guessable import WORKLOADS, chats
from speculation import Run
from workloads import DEFAULT_TRACES

WITH_TRACES = {"sentences", "summary", "rewriting", "turns", "sharegpt", "arithmetic"}
NO_TRACES = pytest.mark.skipif(not DEFAULT_TRACES.is_dir(), reason="the public traces are not beside the checkout")


@pytest.mark.parametrize("name", [pytest.param(name, marks=NO_TRACES if name in WITH_TRACES else ()) for name in WORKLOADS])
def test_chats_are_the_same_each_time_and_all_differ(name):
    found = chats(name, 64)
    assert found == chats(name, 64)
    assert len({json.dumps(chat) for chat in found}) == 64
    assert all(chat[-1]["role"] == "user" for chat in found)


def test_an_agent_has_written_what_it_read_with_the_change():
    chat = chats("agent", 3)[2]  # two files are done
    calls = [json.loads(message["content"]) for message in chat if message["role"] == "assistant"]
    assert [call["name"] for call in calls] == ["read_file", "write_file"] * 2
    assert all("port = 9000" in call["arguments"]["content"] for call in calls[1::2])
    assert all("port = 8000" in message["content"] for message in chat if message["content"].startswith("Result:\n["))


class Canned:
    """A server whose runs are known."""

    def __init__(self, side, order, speeds, text="same"):
        self.side, self.order, self.speeds, self.text = side, order, iter(speeds), text

    def run(self, asked, _clients):
        self.order.append(self.side)
        return Run([self.text] * len(asked), 100, 100 / next(self.speeds), cpu_ticks=50, guessed=40, accepted=10)


def test_sides_take_turns_and_the_medians_are_compared():
    order = []
    servers = {"off": Canned("off", order, [10, 20, 30]), "on": Canned("on", order, [30, 30, 90])}
    found = speculation.measure(servers, chats("story", 2), clients=2, rounds=3)
    assert order == ["off", "on", "on", "off", "off", "on"]
    assert (found["off"], found["on"], found["ratio"], found["range"]) == (20, 30, 1.5, "1.50-3.00")
    assert (found["cpu"], found["guesses_a_token"], found["accepted"], found["differ"]) == (1, 0.4, 0.25, 0)


def test_answers_that_differ_are_counted():
    servers = {"off": Canned("off", [], [10] * 2), "on": Canned("on", [], [10] * 2, text="other")}
    assert speculation.measure(servers, chats("story", 3), clients=1, rounds=2)["differ"] == 6


def test_a_small_model_is_compared_with_the_side_that_has_none():
    speeds = {"off": [10] * 2, "on": [20, 40], "draft": [40, 60]}
    servers = {side: Canned(side, [], one) for side, one in speeds.items()}
    found = speculation.measure(servers, chats("story", 2), clients=1, rounds=2)
    assert (found["ratio"], found["draft"], found["drafted"]["ratio"], found["drafted"]["range"]) == (3, 50, 1.667, "1.50-2.00")
