"""Qwen 3, dense: Llama's structure with a norm on each head of queries and keys.

Source: arXiv 2505.09388, and transformers' modeling_qwen3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from penstock.models import llama
from penstock.models.architectures import Architecture


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"head_dim": 128, **values}


QWEN3 = Architecture(describe=partial(llama.describe, qk_norms="heads"), of_hf=llama.of_qwen_hf, hf_values=_values)
