"""A stand-in for a peer that is driven in process: its lines are those of `benchmarks/peers/drive_openvino.py`."""

import json
import sys

print("ready", flush=True)
for line in sys.stdin:
    jobs = json.loads(line)["jobs"]
    if jobs[0][0] == "end":
        break
    if jobs[0][0] == "silent":
        continue
    replies = [
        {
            "start_s": 0.0,
            "token_times_s": [0.5 * k for k in range(1, tokens + 1)],
            "num_tokens": tokens if prompt != "short" else tokens - 1,
            "num_prompt_tokens": 1,
            "text": prompt,
        }
        for prompt, tokens in jobs
    ]
    print(json.dumps({"seconds": 2.0, "replies": replies}), flush=True)
