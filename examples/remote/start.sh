#!/usr/bin/env bash
# Start one vLLM server per model folder on this host, one GPU each, wait until all answer, and print their addresses.
#   VLLM=/opt/vllm/bin/python ./start.sh models/a models/b models/c
# They end with this script (Ctrl-C). Reach them from elsewhere only through a network you trust, and set KEY.
set -euo pipefail

: "${VLLM:=python3}"    # a Python that has vLLM 0.32 or later
: "${PORT:=8001}"       # of the first server
: "${HOST:=127.0.0.1}"
: "${FLAGS:=}"          # more flags, for instance --tensor-parallel-size 4

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
number=0
for folder in "$@"; do
  # shellcheck disable=SC2086
  CUDA_VISIBLE_DEVICES=$number "$VLLM" -m vllm.entrypoints.openai.api_server \
    --model "$folder" --served-model-name "$(basename "$folder")" --host "$HOST" --port $((PORT + number)) \
    --enable-scale-out --enable-prompt-tokens-details --enable-prefix-caching --max-logprobs 20 \
    ${KEY:+--api-key "$KEY"} $FLAGS >"vllm-$number.log" 2>&1 &
  number=$((number + 1))
done
for ((i = 0; i < number; i++)); do
  until curl -fs "http://$HOST:$((PORT + i))/health" >/dev/null; do
    kill -0 "$(jobs -p | sed -n "$((i + 1))p")" 2>/dev/null || { echo "server $i has ended: see vllm-$i.log" >&2; exit 1; }
    sleep 2
  done
  echo "http://$HOST:$((PORT + i))"
done
wait
