"""A stand-in for an inference server, as a program: each completion is as many events as asked for.

python canned_server.py PORT [fail]
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = [{"choices": [{"text": f" {body['prompt']}"}]}] * body["max_tokens"]
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": body["max_tokens"]}}
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in [*map(json.dumps, [*tokens, usage]), "[DONE]"]:
            event = f"data: {data}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")


if __name__ == "__main__":
    if sys.argv[2:] == ["fail"]:
        sys.exit("out of memory")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
