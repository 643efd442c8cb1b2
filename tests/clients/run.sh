#!/usr/bin/env bash
# The clients that people have, against a real server: `make test-clients`. Makes build/clients-venv with them.
#
#   PORT=N  of the server (default 8971)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

VENV=build/clients-venv
URL=http://127.0.0.1:${PORT:=8971}
CLIENTS=(openai langchain-openai llama-index-embeddings-openai cohere huggingface_hub numpy)

if [[ ! -f $VENV/.installed ]]; then
  .venv/bin/python -m venv "$VENV"
  "$VENV/bin/pip" install --quiet --disable-pip-version-check "${CLIENTS[@]}"
  touch "$VENV/.installed"
fi
.venv/bin/penstock pull minilm
.venv/bin/penstock serve minilm --port "$PORT" &
server=$!
trap 'kill $server; wait $server || true' EXIT
"$VENV/bin/python" - "$URL/ready" <<'PYTHON'
import sys, time, urllib.request

for _ in range(600):
    try:
        urllib.request.urlopen(sys.argv[1])
        break
    except OSError:
        time.sleep(0.1)
else:
    sys.exit("the server was not ready within a minute")
PYTHON
"$VENV/bin/python" tests/clients/encoders.py "$URL"
