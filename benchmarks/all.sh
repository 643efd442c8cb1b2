#!/usr/bin/env bash
# Runs every benchmark, one after the other, and writes the figures into docs/performance.md. Over an hour on two cores, which
# should have nothing else to do.
#
#   make install && benchmarks/all.sh [FOLDER]        results go to build/results, or FOLDER
#
# From the environment: PYTHON (.venv/bin/python); QWEN, the GGUF file of Qwen2.5-Coder-1.5B-Instruct Q4_K_M, without which its part
# is left out; PEERS_ARGS, for peers.py, such as "--setup"; ONLY, a pattern of the results' names, such as "step-*".
# A benchmark that fails is named at the end, and its section of the page stays as it was.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=${1:-build/results}
mkdir -p "$folder"
done=() failed=()

# run NAME SCRIPT ARGUMENT...
run() {
  local name=$1 script=$2
  shift 2
  # shellcheck disable=SC2254  # ONLY is a pattern
  case $name in ${ONLY:-*}) ;; *) return ;; esac
  echo "== $name: $script $*"
  if "$python" "benchmarks/$script" "$@" >"$folder/$name.part"; then
    mv "$folder/$name.part" "$folder/$name.txt"
    done+=("$folder/$name.txt")
  else
    failed+=("$name")
  fi
}

run peaks peaks.py
run scheduler scheduler.py
run startup startup.py
run inprocess inprocess.py
run streaming streaming.py
variants=$("$python" -c 'from penstock.backends.native._native import usable_variants as u; print(*u())')
first=${variants%% *}
for variant in $variants; do
  if [ "$variant" = "$first" ]; then
    run "kernels-$variant" kernels.py --variant "$variant"
  else
    run "kernels-$variant" kernels.py --variant "$variant" --kinds q4_1 q8_0 bf16 --rows 1,2,4,8,16,32,64,128 --seconds 0
  fi
  run "step-$variant" step.py --variant "$variant"
done
if [ -n "${QWEN:-}" ]; then run startup-qwen startup.py --model "$QWEN" --repeat 3; fi
if [ -n "${QWEN:-}" ]; then run step-qwen step.py --model "$QWEN" --steps 1x1@128 16x1@256 1x512@0; fi
# shellcheck disable=SC2086  # several arguments
{
  run peers-sharegpt peers.py ${PEERS_ARGS:-}
  run peers-azure peers.py --workload azure ${PEERS_ARGS:-}
  run peers-short peers.py --workload short ${PEERS_ARGS:-}
  if [ -n "${QWEN:-}" ]; then run peers-qwen peers.py --model qwen --model-file "$QWEN" ${PEERS_ARGS:-}; fi
}

if [ ${#done[@]} -gt 0 ]; then "$python" benchmarks/report.py "${done[@]}"; fi
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
