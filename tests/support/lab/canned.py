"""A server whose answers are written by the test, byte for byte."""

import json
import socket
import threading

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CLOSE = None


def event(data):
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def token(text):
    return event({"choices": [{"text": text}]})


def usage(completion_tokens=3, prompt_tokens=2):
    return event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}})


def chunk(payload):
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def stream(*payloads):
    return HEAD + b"".join(map(chunk, payloads)) + b"0\r\n\r\n"


def answer_of(*texts):
    """A whole stream of one token for each text."""
    return stream(*map(token, texts), usage(len(texts)), event(b"[DONE]"))


def plain(body, status="200 OK", headers=""):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(content)}\r\n\r\n".encode() + content


DONE = event(b"[DONE]")
GOOD = answer_of("a", '"error"', "é\r\n\r\n")


class Request:
    def __init__(self, line, headers, body, connection_number):
        self.line, self.headers, self.body, self.connection_number = line, headers, body, connection_number

    @property
    def json(self):
        return json.loads(self.body)


class CannedServer:
    """`respond(request)` gives the pieces of an answer, one after the other; CLOSE among them closes the connection."""

    def __init__(self, respond, tls=None):
        self.respond = respond
        self.tls = tls
        self.requests = []
        self.num_connections = self.num_running = self.max_running = 0
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self.serve, args=(connection, self.num_connections), daemon=True).start()

    def serve(self, connection, number):
        try:
            with self.tls.wrap_socket(connection, server_side=True) if self.tls else connection as opened:
                while self.answer_one(opened, number):
                    pass
        except OSError:
            pass  # the client has gone

    def answer_one(self, connection, number):
        if (request := self.read(connection, number)) is None:
            return False
        with self.lock:
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
            self.requests.append(request)
        try:
            for piece in self.respond(request):
                if piece is CLOSE:
                    return False
                connection.sendall(piece)
        finally:
            with self.lock:
                self.num_running -= 1
        return True

    def read(self, connection, number):
        received = b""
        while b"\r\n\r\n" not in received:
            if not (data := connection.recv(1 << 16)):
                return None
            received += data
        head, _, body = received.partition(b"\r\n\r\n")
        line, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (each.split(": ", 1) for each in lines)}
        while len(body) < int(headers.get("content-length", 0)):
            body += connection.recv(1 << 16)
        return Request(line, headers, body, number)

    def close(self):
        self.listener.close()
