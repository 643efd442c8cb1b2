#!/usr/bin/env bash
# The clients that people have, against real servers: `make test-clients`. Makes build/clients-venv with them.
#
#   PORT=N  of the servers, which run one after the other (default 8971)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

VENV=build/clients-venv
URL=http://127.0.0.1:${PORT:=8971}
CLIENTS=(anthropic openai langchain-openai llama-index-embeddings-openai cohere huggingface_hub numpy ollama)

if [[ "$(cat "$VENV/.installed" 2>/dev/null)" != "${CLIENTS[*]}" ]]; then
  .venv/bin/python -m venv "$VENV"
  "$VENV/bin/pip" install --quiet --disable-pip-version-check "${CLIENTS[@]}"
  echo "${CLIENTS[*]}" > "$VENV/.installed"
fi

trap '[[ -z ${server:-} ]] || { kill "$server"; wait "$server" || true; }' EXIT

# check MODEL SCRIPT [ARGS OF THE SERVER]: has a script of this folder ask a server of the model.
check() {
  local model=$1 script=$2
  shift 2
  .venv/bin/penstock pull "$model"
  .venv/bin/penstock serve "$model" --port "$PORT" "$@" &
  server=$!
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
  "$VENV/bin/python" "tests/clients/$script" "$URL" || failed=1
  kill "$server"
  wait "$server" || true
  server=
}

failed=0
check minilm encoders.py
check smollm2:135m messages.py --api-key none
check smollm2:135m with_ollama.py minilm
exit "$failed"
