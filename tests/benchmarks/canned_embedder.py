"""A stand-in for a library that embeds, driven as `benchmarks/peers/embed.py`: a vector is of the length of its text alone."""

import json
import sys

import numpy as np

print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if order["texts"] == ["end"]:
        break
    vectors = np.array([[len(text), 1.0] for text in order["texts"]], np.float32)
    if order["vectors"]:
        np.save(order["vectors"], vectors)
    seconds = [float(len(text)) for text in order["texts"]] if order["one_by_one"] else [0.5]
    print(json.dumps({"seconds": seconds}), flush=True)
