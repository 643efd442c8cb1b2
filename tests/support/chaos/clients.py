"""Clients of a chaos test, and what became of their requests."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from itertools import count

import httpx

from support.chaos.requests import Ask, Asks, text_of

MAX_TOLD = 20
"""Most failures whose text is kept."""


class Site:
    """The server's address, and whether it is there."""

    def __init__(self, url: str) -> None:
        self._url, self._old = url, list[httpx.AsyncClient]()
        self.generation = 0
        self.num_stops = 0
        """Times that the server was stopped, to go on later."""
        self.is_up = asyncio.Event()
        self.open()

    def open(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        self.http = httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits)
        self.is_up.set()

    def lose(self) -> None:
        """Note that the server is about to be killed. Clients of the next one have connections of their own."""
        self.generation += 1
        self.is_up.clear()
        self._old.append(self.http)

    async def close(self) -> None:
        """Close all connections. `open` makes new ones."""
        for http in (*self._old, self.http):
            await http.aclose()


class Clients:
    """A closed loop of clients. Each asks again as soon as its request has ended."""

    def __init__(self, site: Site, asks: Asks, seed: int) -> None:
        self.site, self._asks, self._random = site, asks, random.Random(seed)
        self._numbers = count()
        self.num_asked = 0
        self.fates: Counter[str] = Counter()
        self.told: list[str] = []
        """Texts of the first failures."""
        self.num_router_restarts = 0
        self.worst_pause_s = self.worst_start_s = 0.0
        """Longest times between two events of a stream, and until the first one, where the front was not stopped."""

    async def run(self, num_clients: int, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(self._loop(end_s))

    async def _loop(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            await self.ask_next()

    async def ask_next(self) -> None:
        self.num_asked += 1
        ask, kind = self._asks.next(), self._random.choices(["stays", "leaves", "cancels"], [0.86, 0.07, 0.07])[0]
        fate = await self._ask(ask, kind)
        if fate == "router restart":
            self.num_router_restarts += 1
            await self.site.is_up.wait()
            fate = await self._ask(ask, kind)
        self.fates[fate.partition(":")[0]] += 1
        if ":" in fate and len(self.told) < MAX_TOLD:
            self.told.append(f"{fate} <- {kind} {ask.path} {ask.body}")

    async def _ask(self, ask: Ask, kind: str) -> str:
        """Send a request once. Return what became of it: a word, and after a colon more about a failure."""
        generation = self.site.generation
        try:
            if kind == "stays" and self._random.random() < 0.5:
                return await self._whole(ask)
            return await self._stream(ask, kind)
        except httpx.TransportError as error:
            if self.site.generation != generation or not self.site.is_up.is_set():
                return "router restart"
            return f"broke off: {error!r}"

    async def _whole(self, ask: Ask) -> str:
        response = await self.site.http.post(ask.path, json=ask.body)
        if response.status_code != 200:
            return f"failed: {response.status_code} {response.text}"
        choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
        found = tuple((text_of(choice), choice["finish_reason"]) for choice in choices)
        return "succeeded" if found == ask.answers else f"wrong: {found} instead of {ask.answers}"

    async def _stream(self, ask: Ask, kind: str) -> str:
        name, http = f"chaos-{next(self._numbers)}", self.site.http
        num_stops, num_events = self.site.num_stops, self._random.randint(1, 30)
        texts, reasons = [""] * len(ask.answers), [list[str]() for _ in ask.answers]
        is_done, last_s, is_first = False, time.monotonic(), True
        body = {**ask.body, "stream": True}
        async with http.stream("POST", ask.path, json=body, headers={"X-Request-Id": name}) as response:
            if response.status_code != 200:
                return f"failed: {response.status_code} {(await response.aread()).decode()}"
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if is_done:
                    return f"wrong: after its end comes {line}"
                now_s = time.monotonic()
                if self.site.num_stops == num_stops:
                    if is_first:
                        self.worst_start_s = max(self.worst_start_s, now_s - last_s)
                    else:
                        self.worst_pause_s = max(self.worst_pause_s, now_s - last_s)
                last_s, is_first = now_s, False
                if line == "data: [DONE]":
                    is_done = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return "cancelled" if kind == "cancels" and num_events <= 0 else f"failed: {line}"
                for choice in event["choices"]:
                    texts[choice["index"]] += text_of(choice)
                    if choice["finish_reason"] is not None:
                        reasons[choice["index"]].append(choice["finish_reason"])
                is_cancelled = kind == "cancels" and num_events <= 0  # its last character may be incomplete
                shown = [text.rstrip("\ufffd") if is_cancelled else text for text in texts]
                wrong = [text for text, (answer, _) in zip(shown, ask.answers, strict=True) if not answer.startswith(text)]
                if wrong:
                    return f"wrong: {wrong} does not begin any of {ask.answers}"
                num_events -= 1
                if num_events == 0 and kind == "leaves":
                    return "left"
                if num_events == 0 and kind == "cancels":
                    await http.delete(f"/v1/requests/{name}")
        if not is_done:
            return "broke off: without [DONE]"
        expected = [(text, [reason]) for text, reason in ask.answers]
        found = list(zip(texts, reasons, strict=True))
        return "succeeded" if found == expected else f"wrong: {found} instead of {expected}"
