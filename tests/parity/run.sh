#!/usr/bin/env bash
# The full comparison with transformers: `make test-parity`. Arguments go to `python -m parity.full`, or to
# `python -m parity.embeddings compare` for a model with the files of sentence-transformers: `make test-parity MODEL=minilm`.
#
# Two environments meet in files: build/parity-venv has torch and writes what the reference answers to build/parity;
# .venv has Penstock and compares. The exit code is that of the comparison.
#
#   TRACES=DIR       folder with sonnet.txt and sharegpt_1000.jsonl (default ../shared/traces; see tests/golden/README.md)
#   MODEL=NAME|FILE  another model (default smollm2:135m); PROMPTS=N takes the first N prompts, for larger ones
#   WINDOW_TOKENS=N  length of the texts whose perplexity is compared (default 1024), for models with windows of their own
#   PARITY_REUSE=1   compare with the reference's answers of the last run
#   PYTHON=...       interpreter for build/parity-venv (default .venv/bin/python), which venv.sh makes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

TRACES=${TRACES:-../shared/traces}
MODEL=${MODEL:-smollm2:135m}
# Threads that wait do not spin: on a busy machine that is several times faster.
export OMP_WAIT_POLICY=PASSIVE PYTHONPATH=tests
VENV=build/parity-venv
ANSWERS=build/parity

answer() {
  local -a windows=()
  if [[ -f $TRACES/sonnet.txt && -f $TRACES/sharegpt_1000.jsonl ]]; then
    windows=(--windows "$TRACES" ${WINDOW_TOKENS:+--window-tokens "$WINDOW_TOKENS"})
  else
    echo "$TRACES has no sonnet.txt or no sharegpt_1000.jsonl: only the committed excerpt is scored for perplexity."
    echo "tests/golden/README.md says where both come from; TRACES=DIR names another folder."
  fi
  rm -rf "$ANSWERS"
  "$VENV/bin/python" -m parity.make_golden "$1" --output "$ANSWERS" ${PROMPTS:+--prompts "$PROMPTS"} "${windows[@]}"
}

.venv/bin/python -m parity.vocabularies
[[ -e $MODEL ]] || .venv/bin/penstock pull "$MODEL"
path=$(.venv/bin/python -c 'import sys; from support.parity.executors import find_model; print(find_model(sys.argv[1]).path)' "$MODEL")
if [[ -d $path/1_Pooling ]]; then # it embeds texts
  if [[ ${PARITY_REUSE:-} != 1 || ! -f $ANSWERS/embeddings.npz ]]; then
    tests/parity/venv.sh
    rm -rf "$ANSWERS" && mkdir -p "$ANSWERS"
    "$VENV/bin/python" -m parity.embeddings make "$path" "$ANSWERS/embeddings.npz" --traces "$TRACES"
  fi
  exec .venv/bin/python -m parity.embeddings compare "$MODEL" "$ANSWERS/embeddings.npz" "$@"
fi
if [[ ${PARITY_REUSE:-} != 1 || ! -f $ANSWERS/manifest.json ]]; then
  tests/parity/venv.sh
  answer "$path"
fi
exec .venv/bin/python -m parity.full "$ANSWERS" --model "$MODEL" "$@"
