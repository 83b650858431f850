#!/usr/bin/env bash
# How demo/drafter was made: the target's own completions of prompts whose topics the demo does not ask about,
# recorded in bfloat16, then 2 draft layers trained on them in a run of 8000 steps, of which steps 250 and 4000
# are shipped. About two hours on 2 cores. Every step resumes when it is repeated. Other hardware, and other
# batches, round bfloat16 otherwise, so a rerun gives a sibling, not the same bytes.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-demo-output/recipe}
mkdir -p "$work"
PATH=.venv/bin:$PATH

python demo/training_prompts.py > "$work/prompts.jsonl"
recording=$(draftgauge record --target .cache/SmolLM2-135M-Instruct --prompts "$work/prompts.jsonl" \
    --taps 1,10,19,27 --dtype bfloat16 --max-new-tokens 224 --batch-size 64 \
    --recordings "$work/recordings" --json | python -c 'import json, sys; print(json.load(sys.stdin)["path"])')
draftgauge train --recording "$recording" --out "$work/training" --mask-token-id 3 --autocast \
    --steps 8000 --save-steps 250,4000
for step in 250 4000; do
    python demo/ship.py "$work/training/step_$step" demo/drafter
done
