"""The server that a benchmark sends to: its address, the request fields that it accepts, its tokenizer.

`Target` makes request bodies for OpenAI's API. `Questions` finds out before a run what the server supports.
"""

from __future__ import annotations

import http.client
import ipaddress
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from urllib.parse import urlsplit

from penstock import fast_json
from penstock.lab import answers
from penstock.types.errors import PenstockError

MAX_TOKENIZE_S = 0.005
"""The server's tokenizer is used if it counts a text in at most this mean time."""
_PROBES = ("a", "the word", "some words", "four or five words")
_OPTIONAL_FIELDS = ("ignore_eos", "stream_options")
"""Fields to leave out if the server refuses them."""


@dataclass(frozen=True, slots=True)
class Address:
    url: str
    scheme: str
    host: str
    port: int
    host_header: str
    path: str

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @classmethod
    def of(cls, url: str) -> Address:
        """Parse a server's `http` or `https` URL. Raises PenstockError for anything else."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            parts, port = urlsplit(""), 0
        if "@" in parts.netloc:  # not shown in the message: it may be a password
            raise PenstockError(
                f"The address of {parts.netloc.rpartition('@')[2]} has a user or a password, which is not sent.",
                remedy="Remove it, including the @. Give the server's key with --api-key.",
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PenstockError(f"{url!r} is not the address of a server.", remedy="Write it as http://127.0.0.1:8000.")
        return cls(url, parts.scheme, parts.hostname, port, parts.netloc, parts.path.rstrip("/").removesuffix("/v1"))

    def unreachable(self, error: Exception) -> PenstockError:
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        remedy = "Is a server running there? `penstock serve` starts one."
        if isinstance(error, ssl.SSLCertVerificationError):
            remedy = "Name the file of its certificate: --cafile FILE.pem."
        return PenstockError(f"{self.url} can't be reached: {cause}.", remedy=remedy)


Prompt = str | Sequence[int] | Sequence[str]


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"
    EMBEDDINGS = "embeddings"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Endpoint.CHAT else f"/v1/{self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    url: str
    """`http://HOST:PORT` or `https://...`, with or without `/v1` at the end. Any other path is kept."""
    model: str = ""
    endpoint: Endpoint = Endpoint.COMPLETIONS
    stream: bool = True
    api_key: str | None = field(default=None, repr=False)
    extra_body: Mapping[str, object] = field(default_factory=dict)
    """Fields to add or replace in each request. None removes a field."""
    limit_field: str = "max_tokens"
    takes_continuous_usage: bool = True
    """Whether the server takes `stream_options.continuous_usage_stats`: a count of tokens in each event."""
    tls: ssl.SSLContext | None = field(default=None, repr=False, compare=False)
    """TLS settings for https. None trusts the system's certificate authorities."""

    def __post_init__(self) -> None:
        key = self.api_key
        if key is not None and not (key.isascii() and key.isprintable() and key.split() == [key]):
            detail = "The API key is empty, or has a space or a character that is not printable ASCII."
            raise PenstockError(detail, remedy="Check --api-key.")

    @property
    def asks_to_ignore_eos(self) -> bool:
        return self.endpoint is not Endpoint.EMBEDDINGS and self.extra_body.get("ignore_eos", True) is True

    def body(
        self, prompt: Prompt | Sequence[Mapping[str, str]], num_output_tokens: int, *, has_continuous_usage: bool = False
    ) -> bytes:
        """Return the JSON body of a request. `prompt` is a list of messages for a chat.

        `has_continuous_usage`: request a count of tokens in each event, if the server takes this.
        """
        body: dict[str, object] = {"model": self.model}
        if self.endpoint is Endpoint.EMBEDDINGS:
            body["input"] = prompt
        else:
            body["messages" if self.endpoint is Endpoint.CHAT else "prompt"] = prompt
            body |= {self.limit_field: num_output_tokens, "temperature": 0, "ignore_eos": True}
            if self.stream:
                options = {"include_usage": True}
                if has_continuous_usage and self.takes_continuous_usage:
                    options["continuous_usage_stats"] = True
                body |= {"stream": True, "stream_options": options}
        if self.extra_body:
            body |= self.extra_body
            body = {name: value for name, value in body.items() if value is not None}
        return fast_json.dumps(body)


class Questions:
    def __init__(self, target: Target, *, timeout_s: float = 120.0) -> None:
        """Connect to a server when the first question is asked. Raises PenstockError for a bad URL."""
        self._address = address = Address.of(target.url)
        where = address.host, address.port
        self._connection = (
            http.client.HTTPSConnection(*where, timeout=timeout_s, context=target.tls)
            if address.scheme == "https"
            else http.client.HTTPConnection(*where, timeout=timeout_s)
        )
        self._target = target

    def __enter__(self) -> Questions:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.close()

    def model(self) -> str:
        """Return the name of the first model that the server lists. Raises PenstockError."""
        status, body = self.ask("GET", "/v1/models")
        if status in _REMEDIES and status != 404:
            raise PenstockError(f"{self._target.url} answers {status}: {answers.error_of(body)}", remedy=_REMEDIES[status])
        try:
            return str(fast_json.loads(body)["data"][0]["id"])
        except (fast_json.DecodeError, LookupError, TypeError):
            said = body[:200].decode(errors="replace")
            raise PenstockError(
                f"{self._target.url} does not list its models: status {status}, {said!r}.", remedy="Name one with --model."
            ) from None

    def server(self) -> str:
        """Return the server's name and version, as far as it reports them. Raises PenstockError if it can't be reached."""
        owner, version = self._got("/v1/models").get("data"), self._got("/version").get("version")
        name = owner[0].get("owned_by") if isinstance(owner, list) and owner and isinstance(owner[0], dict) else None
        return " ".join(part for part in (name, version) if isinstance(part, str))

    def tokenize(self, text: str) -> list[int] | None:
        """Return a text's token ids, without special tokens, or None if the server can't tokenize. Raises PenstockError."""
        own = {"model": self._target.model, "prompt": text, "add_special_tokens": False}  # for Penstock and vLLM
        for body in (own, {"content": text}):  # for llama.cpp
            found = self._got("/tokenize", body).get("tokens")
            if not isinstance(found, list) or not all(type(token_id) is int for token_id in found):
                continue
            if found or not text:  # without its own field, llama.cpp answers with no tokens
                return found
        return None

    def detokenize(self, token_ids: Sequence[int]) -> str | None:
        for body in ({"model": self._target.model, "tokens": token_ids}, {"tokens": token_ids}):
            found = self._got("/detokenize", body)
            text = found.get("prompt", found.get("content"))
            if isinstance(text, str):
                return text
        return None

    def _got(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, object]:
        status, answer = self.ask("GET", path) if body is None else self.ask("POST", path, fast_json.dumps(body))
        try:
            found = fast_json.loads(answer) if status == 200 else {}
        except fast_json.DecodeError:
            return {}
        return found if isinstance(found, dict) else {}

    def settle(self) -> tuple[Target, tuple[str, ...]]:
        """Send test requests for one token. Return the target without what the server refuses, and notes on fields left out.

        Raises PenstockError if the server would refuse every request.
        """
        target = self._target
        notes: list[str] = []
        while True:
            messages = [{"role": "user", "content": "Hello"}]
            body = target.body(messages if target.endpoint is Endpoint.CHAT else "Hello", 1, has_continuous_usage=True)
            status, answer = self.ask("POST", target.endpoint.path, body)
            if status == 200:
                return target, tuple(notes)
            said = answer[:2000].decode(errors="replace")
            if status in (429, 503):
                notes.append(
                    f"The server refused the test request before the run ({status}): optional fields are sent untested."
                )
                return target, tuple(notes)
            refused = [name for name in _OPTIONAL_FIELDS if name in said and name not in target.extra_body]
            if status in (400, 422) and refused and (refused[0] != "stream_options" or not target.takes_continuous_usage):
                target = replace(target, extra_body={**target.extra_body, refused[0]: None})
                notes.append(_LEFT_OUT[refused[0]])
            elif status in (400, 422) and "max_completion_tokens" in said and target.limit_field == "max_tokens":
                target = replace(target, limit_field="max_completion_tokens")
            elif status in (400, 422) and target.takes_continuous_usage:  # The refusal may not name this field.
                target = replace(target, takes_continuous_usage=False)
            else:
                raise PenstockError(
                    f"{target.url} answers {target.endpoint.path} with {status}: {answers.error_of(answer)}",
                    remedy=_REMEDIES.get(status, "Does the server have this route, and take these fields?"),
                )

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Send a request and return (status, body). Raises PenstockError if the server can't be reached."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._target.api_key is not None:
            headers["Authorization"] = f"Bearer {self._target.api_key}"
        while True:
            is_kept = self._connection.sock is not None
            try:
                self._connection.request(method, self._address.path + path, body, headers)
                answer = self._connection.getresponse()
                return answer.status, answer.read()
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                if not is_kept:  # the server may have closed an idle connection: try a new one
                    raise self._address.unreachable(error) from None


_LEFT_OUT = {
    "ignore_eos": "The server does not take ignore_eos: an answer ends where the model ends it.",
    "stream_options": "The server does not take stream_options: events with text are counted as tokens.",
}
_REMEDIES = {
    401: "Give its key with --api-key.",
    403: "Give its key with --api-key.",
    404: "Name a model that it serves with --model, and a route that it has with --endpoint.",
}


class ServerTokenizer:
    """A `prompts.Tokenizer` that asks the server. Each text takes an HTTP request."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self._known: dict[str, list[int]] = {}

    @classmethod
    def of(cls, questions: Questions) -> ServerTokenizer | None:
        """Return the server's tokenizer, or None if it has none or takes longer than `MAX_TOKENIZE_S`. Raises PenstockError."""
        tokenizer = cls(questions)
        if (token_ids := questions.tokenize("the")) is None or questions.detokenize(token_ids) is None:
            return None
        begin_s = time.perf_counter()
        for text in _PROBES:
            tokenizer.encode(text, add_special_tokens=False)
        return tokenizer if time.perf_counter() - begin_s <= MAX_TOKENIZE_S * len(_PROBES) else None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens, "the server would add its own"
        if (known := self._known.get(text)) is not None:
            return known
        token_ids = self._questions.tokenize(text)
        if token_ids is None:
            raise PenstockError("The server did not count the tokens of a text.", remedy="Count them with --tokenizer MODEL.")
        if len(text) <= 40:  # single words repeat, prompts do not
            self._known[text] = token_ids
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens  # servers have no such option
        text = self._questions.detokenize(token_ids)
        if text is None:
            raise PenstockError("The server did not write tokens as text.", remedy="Count tokens with --tokenizer MODEL.")
        return text
