"""The Python API: answers of the engine without a server, checked by the server's rules; nothing runs on when it is left."""

from __future__ import annotations

import _thread
import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest

import penstock
from penstock import LLM, AsyncLLM, PenstockError, RequestOutput, SamplingParams, StructuredOutputsParams, inprocess
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.config import ServerConfig
from penstock.deploy.resources import MemoryShare
from penstock.engine.bridge import Stream
from penstock.engine.ports import OutputChunk
from penstock.engine.state import EngineState
from penstock.llm import _own_resources
from penstock.serve.app import create_app
from penstock.testing import make_request
from penstock.types.errors import NotEnoughMemory, Rejected, RejectReason
from penstock.types.plan import Ticket
from penstock.types.request import FinishReason, Request
from penstock.types.result import StepResult
from support.deployments import deployment_of
from support.parity.encoder_cases import ENCODERS, write_encoder
from support.tiny_adapters import factors_of_llama, write_adapter
from support.tiny_models import TinyLlama, write_gguf, write_hf

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
SETTINGS: dict[str, object] = {"backend": "reference", "kv_cache_memory": "2MiB", "max_num_seqs": 4}
CONVERSATION = [{"role": "user", "content": "in the"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyLlama(max_model_len=512))


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[LLM]:
    with LLM(path, **SETTINGS) as model:
        yield model


def running_of(model: LLM | AsyncLLM) -> Any:
    return model._running


def engine_of(model: LLM | AsyncLLM) -> Any:
    return running_of(model).engine


def wait_until_idle(model: LLM) -> None:
    end_s = time.monotonic() + 20
    while (load := engine_of(model).load()).num_running + load.num_waiting:
        assert time.monotonic() < end_s, "a request runs on"
        time.sleep(0.001)


def only(outputs: list[RequestOutput]) -> RequestOutput:
    [output] = outputs
    return output


def test_importing_the_package_loads_nothing_of_it() -> None:
    code = (
        "import penstock, sys; assert not [name for name in sys.modules if name.startswith('penstock.')], sys.modules;"
        "assert 'LLM' in dir(penstock); from penstock import LLM; assert 'penstock.llm' in sys.modules;"
        "assert 'starlette' not in sys.modules and 'tqdm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_has_every_name_that_it_tells() -> None:
    outputs = {name for name in vars(inprocess) if name.endswith(("Output", "Params", "Options")) and not name.startswith("_")}
    assert outputs < set(penstock.__all__)
    assert [name for name in penstock.__all__ if not hasattr(penstock, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'LM'"):
        penstock.LM  # type: ignore[attr-defined]  # noqa: B018


def test_a_type_checker_finds_every_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"from penstock import {', '.join(penstock.__all__)}")
    stub = Path(penstock.__file__).with_suffix(".pyi")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=skip", stub, script]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stdout


def test_answers_come_in_the_order_of_the_prompts(model: LLM) -> None:
    prompts = ["in the", "of a", "and", "to be", "in the"]  # more than rows
    outputs = model.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    assert all(output.finished and len(output.outputs) == 1 for output in outputs)
    assert outputs[0].outputs == outputs[4].outputs
    for prompt, output in zip(prompts, outputs, strict=True):
        alone = only(model.generate(prompt, GREEDY))
        assert (alone.outputs, alone.prompt_token_ids) == (output.outputs, output.prompt_token_ids)
    assert len({output.request_id for output in outputs}) == 5


def test_a_prompt_may_be_token_ids_alone_or_among_others(model: LLM) -> None:
    token_ids = only(model.generate("in the", GREEDY)).prompt_token_ids
    alone = only(model.generate(token_ids, GREEDY))
    both = model.generate([token_ids, "in the"], GREEDY)
    assert alone.prompt is None
    assert alone.outputs == both[0].outputs == both[1].outputs


def test_each_prompt_may_have_its_own_parameters(model: LLM) -> None:
    outputs = model.generate(["in the", "in the"], [GREEDY, SamplingParams(temperature=0.0, max_tokens=3)])
    long, short = (output.outputs[0] for output in outputs)
    assert len(short.token_ids) == 3
    assert long.token_ids[:3] == short.token_ids
    assert short.finish_reason == "length"
    for given, words in (
        ([GREEDY], "2 prompts and 1 sampling_params"),
        ([], "2 prompts and 0 sampling_params"),
        ({"max_tokens": 8}, "'sampling_params' is of type dict. Give a SamplingParams, or one for each"),
        ([GREEDY, None], r"'sampling_params\[1\]' is of type NoneType"),
    ):
        with pytest.raises(PenstockError, match=words):
            model.generate(["in the", "of"], given)
    with pytest.raises(PenstockError, match=r"'adapter\[1\]' is of type int. Give a name"):
        model.generate(["in the", "of"], adapter=[None, 3])


def test_the_same_seed_gives_the_same_answers_and_n_of_them_differ(model: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=12)
    first, second = (only(model.generate("in the", params)) for _ in range(2))
    assert first.outputs == second.outputs
    assert [answer.index for answer in first.outputs] == [0, 1, 2]
    assert len({answer.text for answer in first.outputs}) == 3
    [one, two] = model.generate(["in the"] * 2, SamplingParams(max_tokens=12))
    assert one.outputs[0].text != two.outputs[0].text, "each prompt draws a seed of its own"


def test_a_seed_of_the_model_makes_a_program_repeatable(path: Path) -> None:
    texts = []
    for seed in (5, 5, 6):
        with LLM(path, seed=seed, **SETTINGS) as seeded:
            texts.append([output.outputs[0].text for output in seeded.generate(["in the", "of a"], SamplingParams())])
    assert texts[0] == texts[1] != texts[2]


async def test_concurrent_calls_draw_seeds_in_the_order_of_their_arrival(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second_is_read, read = threading.Event(), inprocess.Asked.answers

    def read_late(asked: inprocess.Asked, *given: Any) -> Any:
        assert asked.prompts == ["of a"] or second_is_read.wait(20)
        answers = read(asked, *given)
        second_is_read.set()
        return answers

    async def ask(prompt: str) -> str:
        return [output async for output in model.generate(prompt)][-1].outputs[0].text

    async with AsyncLLM(path, seed=5, **SETTINGS) as model:
        expected = [await ask("in the"), await ask("of a")]
    monkeypatch.setattr(inprocess.Asked, "answers", read_late)
    async with AsyncLLM(path, seed=5, **SETTINGS) as model:
        assert await asyncio.gather(ask("in the"), ask("of a")) == expected


def test_logprobs_are_of_each_token_and_the_likeliest(model: LLM) -> None:
    [answer] = only(model.generate("in the", SamplingParams(temperature=0.0, max_tokens=4, logprobs=2))).outputs
    assert answer.logprobs is not None
    assert answer.cumulative_logprob == pytest.approx(
        sum(entry[token_id].logprob for entry, token_id in zip(answer.logprobs, answer.token_ids, strict=True))
    )
    for entry, token_id in zip(answer.logprobs, answer.token_ids, strict=True):
        assert entry[token_id].rank == 1, "greedy"
        assert len(entry) == 2
    assert "".join(entry[token_id].decoded_token for entry, token_id in zip(answer.logprobs, answer.token_ids, strict=True))
    assert only(model.generate("in the", GREEDY)).outputs[0].logprobs is None


def test_without_parameters_the_model_s_own_count(tmp_path: Path) -> None:
    """The likeliest token of all would be drawn, if the file did not ban it."""
    plain = write_gguf(tmp_path / "plain.gguf", TinyLlama(max_model_len=512))
    with LLM(plain, **SETTINGS) as llm:
        [first, *_] = only(llm.generate("in the", SamplingParams(temperature=0.0, max_tokens=1))).outputs[0].token_ids
        assert llm.default_sampling == {}
    extra = {"general.sampling.temp": 0.0, "tokenizer.ggml.suppress_tokens": [first]}
    tuned = write_gguf(tmp_path / "tuned.gguf", TinyLlama(max_model_len=512), extra=extra)
    with LLM(tuned, **SETTINGS) as llm:
        assert llm.default_sampling == {"temperature": 0.0}
        [one, two] = [only(llm.generate("in the")).outputs[0].token_ids for _ in range(2)]
        assert one == two  # greedy
        assert first not in one
        drawn = [only(llm.generate("in the", SamplingParams(seed=seed))).outputs[0].token_ids for seed in range(2)]
        assert drawn[0] != drawn[1]
    with LLM(tuned, generation_config="none", **SETTINGS) as llm:
        assert only(llm.generate("in the", GREEDY)).outputs[0].token_ids[0] == first


def test_a_stop_text_ends_the_answer_and_is_told(model: LLM) -> None:
    whole = only(model.generate("in the", GREEDY)).outputs[0].text
    stop = whole[2:4]
    [answer] = only(model.generate("in the", SamplingParams(temperature=0.0, max_tokens=8, stop=[stop]))).outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (whole[: whole.index(stop)], "stop", stop)


@pytest.mark.parametrize(
    ("asked", "check"),
    [
        (StructuredOutputsParams(choice=["yes", "no"]), lambda text: text in ("yes", "no")),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        (StructuredOutputsParams(regex="[0-9]{3}"), lambda text: len(text) == 3 and text.isdigit()),
        (StructuredOutputsParams(grammar='start: "a" "b"'), lambda text: text == "ab"),
        (
            StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                                          "additionalProperties": False}),
            lambda text: isinstance(json.loads(text)["a"], bool),
        ),
    ],
)  # fmt: skip
def test_an_answer_follows_what_was_asked_for(model: LLM, asked: Any, check: Any) -> None:
    outputs = model.generate(["in the", "of a"], SamplingParams(n=2, seed=1, max_tokens=None, structured_outputs=asked))
    assert all(check(answer.text) for output in outputs for answer in output.outputs)


def test_a_continued_message_goes_on_within_what_was_asked_for(model: LLM) -> None:
    begun = [*CONVERSATION, {"role": "assistant", "content": "12"}]
    params = SamplingParams(n=2, seed=1, max_tokens=None, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"))
    output = only(model.chat(begun, params, continue_final_message=True))
    assert [len(answer.text) for answer in output.outputs] == [1, 1]


def test_a_chat_is_made_a_prompt_by_the_template(model: LLM) -> None:
    output = only(model.chat(CONVERSATION, GREEDY))
    assert output.prompt is not None
    assert "in the" in output.prompt
    assert output.prompt != "in the"
    both = model.chat([CONVERSATION, [{"role": "user", "content": "of a"}]], GREEDY)
    assert both[0].outputs == output.outputs
    assert "of a" in (both[1].prompt or "")
    parts = [{"role": "user", "content": [{"type": "text", "text": "in "}, {"type": "text", "text": "the"}]}]
    assert only(model.chat(parts, GREEDY)).outputs == output.outputs
    without = only(model.chat(CONVERSATION, GREEDY, add_generation_prompt=False))
    assert output.prompt.startswith(without.prompt or "?")
    with pytest.raises(PenstockError, match=r"messages\[0\]\.role.* must be one of"):
        model.chat([{"role": "nobody", "content": "a"}])


def test_what_a_chat_does_not_support_is_refused_as_by_the_server(model: LLM) -> None:
    call = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}
    neutral: dict[str, Any] = {"chat_template": None}
    assert only(model.chat([{**CONVERSATION[0], "refusal": None}], GREEDY, **neutral)).finished
    with pytest.raises(PenstockError, match=r"'messages\[1\]\.function_call' is not supported"):
        model.chat([*CONVERSATION, call], GREEDY)
    options: dict[str, Any] = {"chat_template": "{{ messages[0].content }}"}
    with pytest.raises(PenstockError, match="'chat_template' is not supported"):
        model.chat(CONVERSATION, GREEDY, **options)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(PenstockError, match="'chat_template_kwargs' is nested too deeply"):
        model.chat(CONVERSATION, GREEDY, chat_template_kwargs={"x": deep})


def test_an_answer_is_what_the_server_says(model: LLM) -> None:
    """With the same seed, the parameters of one and the fields of the other mean the same."""
    fields: dict[str, Any] = {
        "max_tokens": 12,
        "temperature": 0.9,
        "top_p": 0.8,
        "top_k": 40,
        "seed": 3,
        "n": 2,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "bad_words": ["the"],
    }

    async def ask() -> tuple[list[str], list[str]]:
        transport = httpx.ASGITransport(create_app(deployment_of(running), ServerConfig()), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
            text = await client.post("/v1/completions", json={"prompt": "in the", "logit_bias": {"5": 2.0}, **fields})
            chat = await client.post("/v1/chat/completions", json={"messages": CONVERSATION, **fields})
        choices = [answer.json()["choices"] for answer in (text, chat)]
        return [choice["text"] for choice in choices[0]], [choice["message"]["content"] for choice in choices[1]]

    params = SamplingParams(**fields)
    biased = SamplingParams(logit_bias={5: 2.0}, **fields)
    ours = [answer.text for answer in only(model.generate("in the", biased)).outputs]
    chat = [answer.text for answer in only(model.chat(CONVERSATION, params)).outputs]
    running = running_of(model)
    wait_until_idle(model)
    assert asyncio.run(ask()) == (ours, chat)


def test_a_stream_is_the_answer_as_it_grows(model: LLM) -> None:
    outputs = list(model.stream("in the", GREEDY))
    whole = only(model.generate("in the", GREEDY))
    assert outputs[-1].outputs[0].text == whole.outputs[0].text
    assert "".join(output.outputs[0].new_text for output in outputs) == whole.outputs[0].text
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for shorter, longer in pairwise(output.outputs[0] for output in outputs):
        assert longer.text == shorter.text + longer.new_text
        assert longer.token_ids[: len(shorter.token_ids)] == shorter.token_ids
    assert outputs[-1].metrics.first_token_time_s is not None
    chat = list(model.stream_chat(CONVERSATION, GREEDY))
    assert chat[-1].outputs[0].text == only(model.chat(CONVERSATION, GREEDY)).outputs[0].text


def test_leaving_a_stream_ends_its_request(model: LLM) -> None:
    for output in model.stream("in the", ENDLESS):
        assert not output.finished
        break
    wait_until_idle(model)


def test_ctrl_c_ends_what_is_waited_for(model: LLM) -> None:
    def interrupt() -> None:
        while not engine_of(model).load().num_running:
            time.sleep(0.001)
        _thread.interrupt_main()

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        model.generate(["in the", "of a"], ENDLESS)
    other.join()
    wait_until_idle(model)
    assert model.generate("in the", GREEDY)


def test_ctrl_c_leaves_no_lock_of_python_locked(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come right after a lock was taken by code in Python, such as a `Condition`, and leave it locked for ever."""
    enter = threading.Condition.__enter__

    def interrupted(lock: threading.Condition) -> bool:
        is_entered = enter(lock)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return is_entered

    monkeypatch.setattr(threading.Condition, "__enter__", interrupted)
    assert model.generate("in the", GREEDY)


def test_a_token_that_only_the_tokenizer_knows_is_told_as_text(path: Path) -> None:
    with LLM(path, **SETTINGS) as model:
        running = running_of(model)
        running.model = replace(running.model, vocab_size=running.tokenizer.encode("in", add_special_tokens=False)[0])
        with pytest.raises(PenstockError, match=r"'prompt' contains 'in', token \d+ of the tokenizer, which the"):
            model.generate("in")


async def test_what_an_answer_said_before_it_failed_is_told_first(path: Path) -> None:
    async with AsyncLLM(path, **SETTINGS) as model:
        outputs = model.generate("in the", ENDLESS)
        await anext(outputs)
        [stream] = running_of(model).bridge._readers.values()
        assert isinstance(stream, Stream)
        request_id = next(iter(stream._unfinished))
        failure = OutputChunk(request_id, "the end", (5,), (), at_ns=0, finish_reason=FinishReason.ERROR, detail="It broke.")
        stream._chunks = [failure]
        last = await anext(outputs)
        assert (last.outputs[0].new_text, last.finished, last.outputs[0].finish_reason) == ("the end", False, None)
        with pytest.raises(PenstockError, match="It broke"):
            await anext(outputs)


def test_what_several_threads_ask_runs_together(model: LLM) -> None:
    expected = only(model.generate("in the", GREEDY)).outputs
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(only(model.generate("in the", GREEDY)).outputs)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 6


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 3.0}, "'temperature' must be at most 2"),
        ({"temperature": float("nan")}, "'temperature'"),
        ({"top_p": -0.1}, "'top_p' must be"),
        ({"n": 0}, "'n' must be at least 1"),
        ({"max_tokens": "8"}, "'max_tokens' must be an integer"),
        ({"stop": ["", "a"]}, r"'stop\[0\]'"),
        ({"logprobs": 21}, "'logprobs' must be at most 20"),
        ({"logit_bias": [1]}, "'logit_bias' must be"),
        ({"structured_outputs": 1}, "'structured_outputs' must be"),
        ({"structured_outputs": {"choices": ["a"]}}, r"structured_outputs\.choices"),
    ],
)
def test_parameters_out_of_range_are_refused_when_they_are_made(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PenstockError, match=words):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("in the", SamplingParams(stop_token_ids=[10**6]), r"'stop_token_ids\[0\]' is 1000000, outside"),
        ("in the", SamplingParams(structured_outputs=StructuredOutputsParams()), "'structured_outputs' must have one of"),
        ("in the", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), "regex"),
        ([0, 10**6], GREEDY, r"'prompt\[1\]' is 1000000, outside the vocabulary"),
        ("in the " * 600, GREEDY, r"'prompt' has \d+ tokens; tiny takes 512, the answer included"),
        ("in the", SamplingParams(min_tokens=511, max_tokens=None), "takes 512"),
        ("", GREEDY, "'prompt' has no tokens"),
        ([], GREEDY, None),
        ([1.5], GREEDY, "'prompt' is neither a text nor token ids"),
    ],
)
def test_what_can_not_run_is_refused_before_anything_does(
    model: LLM, prompt: Any, params: SamplingParams, words: str | None
) -> None:
    if words is None:
        assert model.generate(prompt, params) == []
        return
    with pytest.raises(PenstockError, match=words):
        model.generate(prompt, params)
    if isinstance(prompt, str):
        with pytest.raises(PenstockError):
            model.generate(["in the", prompt], [ENDLESS, params])
    wait_until_idle(model)


def test_a_prompt_is_truncated_from_its_beginning(model: LLM) -> None:
    whole = only(model.generate("in the of a", GREEDY)).prompt_token_ids
    short = only(model.generate("in the of a", SamplingParams(truncate_prompt_tokens=2))).prompt_token_ids
    assert short == whole[-2:]
    fitted = only(model.generate("in the " * 600, SamplingParams(truncate_prompt_tokens=-1, max_tokens=12)))
    assert len(fitted.prompt_token_ids) == 500


def test_an_answer_ends_with_the_context(model: LLM) -> None:
    output = only(model.generate("in the", SamplingParams(max_tokens=10**6, ignore_eos=True)))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == model.max_model_len == 512
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_mem": "1GiB"}, r"unknown key 'kv_cache_mem'\. Did you mean kv_cache_memory\? docs/configuration"),
        ({"port": 80}, r"unknown key 'port'\..*docs/configuration"),
        ({"kv_cache_memory": "much"}, "kv_cache_memory: 'much'"),
        ({"policy": "unfair"}, "policy: 'unfair'"),
    ],
)
def test_a_setting_that_is_none_is_refused_with_the_page_of_all(path: Path, settings: dict[str, object], words: str) -> None:
    with pytest.raises(PenstockError, match=words):
        LLM(path, **settings)


def test_settings_reach_the_engine(path: Path) -> None:
    with LLM(path, max_model_len="100", policy="fair", block_size=8, **SETTINGS) as model:
        assert (model.model_name, model.max_model_len) == ("tiny", 100)


class LastComeFirst:
    asked: ClassVar[list[str]] = []

    def key(self, request: Request, now_ns: int) -> tuple[float, ...]:
        self.asked.append(request.request_id)
        return (-request.arrival_ns,)


def test_a_policy_may_be_a_class(path: Path) -> None:
    LastComeFirst.asked.clear()
    with LLM(path, policy=LastComeFirst, **SETTINGS) as model:
        model.generate("in the", GREEDY)
    assert LastComeFirst.asked


def test_a_class_that_its_name_does_not_find_is_refused(path: Path) -> None:
    class Local(LastComeFirst):
        pass

    defined_before = type("LastComeFirst", (), {"__module__": __name__})
    for policy in (Local, defined_before):
        with pytest.raises(PenstockError, match=r"policy: .* can't be found by its name: define it once"):
            LLM(path, policy=policy, **SETTINGS)


def test_all_threads_of_the_tokenizer_start_with_the_model(path: Path) -> None:
    code = f"""
import os
from penstock import LLM
with LLM({str(path)!r}, **{SETTINGS!r}) as model:
    before = os.listdir("/proc/self/task")
    model.num_tokens("the")
    assert set(os.listdir("/proc/self/task")) <= set(before)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_a_closed_model_says_so_and_frees_its_threads(path: Path) -> None:
    before = threading.active_count()
    model = LLM(path, **SETTINGS)
    waiting = model.stream("in the", ENDLESS)
    next(waiting)
    model.close()
    model.close()
    for use in (lambda: model.generate("a"), lambda: next(waiting), lambda: next(model.stream("a"))):
        with pytest.raises(PenstockError, match="The model is closed"):
            use()
    assert engine_of(model).state is EngineState.STOPPED
    end_s = time.monotonic() + 20
    while threading.active_count() > before + 1:  # the executor's may stay
        assert time.monotonic() < end_s, threading.enumerate()
        time.sleep(0.001)


def test_who_waits_when_the_model_is_closed_is_told(path: Path) -> None:
    model = LLM(path, **SETTINGS)
    told: list[BaseException] = []

    def ask() -> None:
        try:
            model.generate("in the", ENDLESS)
        except PenstockError as error:
            told.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while not engine_of(model).load().num_running:
        time.sleep(0.001)
    model.close()
    asking.join(20)
    assert [str(error) for error in told] == [
        "The model is closed, or was loaded before this process was forked. Make another LLM."
    ]


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_ctrl_c_ends_the_wait_for_close_alone(path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[LLM | AsyncLLM]) -> None:
    has_step, go_on, collect = threading.Event(), threading.Event(), ReferenceExecutor.collect

    def collect_late(self: ReferenceExecutor, ticket: Ticket) -> StepResult:
        has_step.set()
        assert go_on.wait(20)
        return collect(self, ticket)

    def interrupt() -> None:
        while engine_of(model).state is not EngineState.DRAINING:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ReferenceExecutor, "collect", collect_late)
    model = kind(path, **SETTINGS)
    with ThreadPoolExecutor(2) as threads:
        asked = threads.submit(model.generate, "in the", GREEDY) if isinstance(model, LLM) else None
        engine_of(model).submit(make_request("r", (5,), max_tokens=2))
        assert has_step.wait(20)
        threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.close()
        assert engine_of(model).state is EngineState.DRAINING
        go_on.set()
        model.close()
        assert engine_of(model).state is EngineState.STOPPED
        assert asked is None or "The model is closed" in str(asked.exception(20))


FORKED = """
import os, sys
import penstock.llm
from penstock import LLM, PenstockError
model = LLM(sys.argv[1], backend="reference", kv_cache_memory="2MiB")
penstock.llm._load_turn.acquire()  # as if another thread loaded a model
child = os.fork()
if child:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), model.generate("in the")[0].finished)
else:
    try:
        model.generate("in the")
    except PenstockError as error:
        print(error, flush=True)
    assert not penstock.llm._open
    with LLM(sys.argv[1], backend="reference", kv_cache_memory="2MiB") as own:
        print(own.generate("in the")[0].finished, flush=True)
"""


def test_a_forked_process_is_told_that_it_has_no_model(path: Path) -> None:
    told = subprocess.run([sys.executable, "-c", FORKED, path], capture_output=True, text=True, timeout=60, check=True)
    assert "was loaded before this process was forked" in told.stdout
    assert told.stdout.endswith("True\n0 True\n"), "the child ended, and the parent's model goes on"


def close_when_asked(model: LLM, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    """Close the model in another thread when work is next handed to its loop. That thread must wait until it is."""
    has_begun, ask = threading.Event(), model._loop.call_soon_threadsafe
    close = model._async.close
    monkeypatch.setattr(AsyncLLM, "close", lambda _: (has_begun.set(), close()))
    closing = threading.Thread(target=model.close)

    def ask_late(*given: Any) -> Any:
        if not closing.ident:
            closing.start()
            assert not has_begun.wait(0.2), "the loop would end without the work"
        return ask(*given)

    monkeypatch.setattr(model._loop, "call_soon_threadsafe", ask_late)
    return closing


def test_a_call_that_found_the_model_open_is_told_also_if_it_is_closed_at_that_moment(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LLM(path, **SETTINGS)
    closing = close_when_asked(model, monkeypatch)
    with pytest.raises(PenstockError, match="The model is closed"):
        model.generate("in the", ENDLESS)
    closing.join(20)
    assert not closing.is_alive()


def test_a_stream_can_be_left_while_the_model_is_closed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLM(path, **SETTINGS)
    for _ in model.stream("in the", ENDLESS):
        closing = close_when_asked(model, monkeypatch)
        break
    closing.join(20)
    assert not closing.is_alive()


@pytest.mark.parametrize("is_engines", [False, True], ids=["the loop's thread", "the engine's thread"])
def test_the_garbage_collector_may_close_a_model_in_any_of_its_threads(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_engines: bool
) -> None:
    model = LLM(path, **SETTINGS)
    running, loop, ended = running_of(model), model._loop, model._closer._ended
    held = [model]  # the last reference, which is dropped in one of its own threads
    if is_engines:
        collect = ReferenceExecutor.collect

        def drop_and_collect(self: ReferenceExecutor, ticket: Ticket) -> StepResult:
            held.clear()
            return collect(self, ticket)

        monkeypatch.setattr(ReferenceExecutor, "collect", drop_and_collect)
        del model
        running.engine.submit(make_request("r", (5,), max_tokens=2))
    else:
        del model
        loop.call_soon_threadsafe(held.clear)
    assert ended.acquire(timeout=20)
    ended.release()
    assert running.engine.state is EngineState.STOPPED


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "garbage-collected"])
def test_memory_that_a_model_has_not_filled_yet_is_not_free_for_another(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    def fails(**_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr("penstock.llm.available_memory_bytes", lambda: 300 << 20)
    settings = SETTINGS | {"kv_cache_memory": "30MiB"}
    with monkeypatch.context() as broken:
        broken.setattr("penstock.deploy.running.RunningModel", fails)
        with pytest.raises(OSError, match="no space"):
            LLM(path, **settings)
    model = LLM(path, **settings)
    with pytest.raises(PenstockError, match=r"kv_cache_memory 30 MiB is more than the 1\d\.\d+ MiB that are free"):
        LLM(path, **settings)
    if is_closed:
        model.close()
    else:
        del model
    LLM(path, **settings).close()


def test_models_that_load_at_once_get_no_memory_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.llm.available_memory_bytes", lambda: 300 << 20)
    with ThreadPoolExecutor(2) as threads:
        loading = [threads.submit(LLM, path, **SETTINGS | {"kv_cache_memory": "30MiB"}) for _ in range(2)]
    errors = [one.exception() for one in loading]
    for one, error in zip(loading, errors, strict=True):
        if error is None:
            one.result().close()
    assert [type(error) for error in errors if error is not None] == [NotEnoughMemory]


def test_what_a_model_has_not_filled_yet_stays_free_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.llm.available_memory_bytes", lambda: 300 << 20)
    resources = _own_resources()
    num_bytes = resources.memory.available_bytes("a")
    resources.memory.take("a", MemoryShare(num_kv_bytes=num_bytes, num_reserve_bytes=0))
    assert resources.memory.available_bytes("a", is_restart=True) == num_bytes


def test_a_program_that_does_not_close_its_model_ends(path: Path) -> None:
    load = f"llm = LLM({str(path)!r}, backend='reference', kv_cache_memory='2MiB')"
    code = f"from penstock import LLM; {load}; next(llm.stream('a'))"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_ends_after_a_model_that_another_thread_dropped(path: Path) -> None:
    code = f"""
import threading, time
from penstock import AsyncLLM
from penstock.backends.reference.executor import ReferenceExecutor

close = ReferenceExecutor.close

def slowly(self):
    time.sleep(0.5)
    close(self)
    print("closed", flush=True)

ReferenceExecutor.close = slowly
load = lambda: AsyncLLM({str(path)!r}, backend="reference", kv_cache_memory="2MiB") and None
thread = threading.Thread(target=load)
thread.start()
thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_a_failed_engine_is_an_error_and_then_made_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.types.errors import ExecutorFailure

    def fail(*_: object) -> None:
        raise ExecutorFailure("as it was told to")

    with LLM(path, **SETTINGS) as model:
        good = only(model.generate("in the", GREEDY)).outputs
        with monkeypatch.context() as broken:
            broken.setattr("penstock.backends.reference.executor.ReferenceExecutor.collect", fail)
            with pytest.raises(PenstockError, match=r"; the log says why\. .*sk again"):
                model.generate("in the", GREEDY)
        end_s = time.monotonic() + 20
        while engine_of(model).state is not EngineState.READY:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        assert only(model.generate("in the", GREEDY)).outputs == good


@pytest.mark.parametrize(
    ("reason", "state", "remedy"),
    [
        (RejectReason.UNAVAILABLE, EngineState.READY, ""),
        (RejectReason.UNAVAILABLE, EngineState.RESTARTING, " The engine restarts after a failure: ask again in a few seconds."),
        (RejectReason.UNAVAILABLE, EngineState.FAILED, " The engine can't be restarted: load the model again."),
        (RejectReason.NEVER_FITS, EngineState.RESTARTING, ""),
    ],
)
def test_a_refusal_says_whether_an_engine_that_failed_will_run(reason: RejectReason, state: EngineState, remedy: str) -> None:
    refusal = OutputChunk("r0", "", (), (), 0, finish_reason=FinishReason.REJECTED, detail="No.", reject_reason=reason.value)
    running: Any = SimpleNamespace(engine=SimpleNamespace(state=state))
    assert str(inprocess.ended_early(refusal, "answer", running)) == f"No.{remedy}"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_is_shown_on_a_terminal_alone(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, use_tqdm, is_shown in ((Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        model.generate(["in the", "of a"], GREEDY, use_tqdm=use_tqdm)
        assert ("2/2" in stream.getvalue()) is is_shown


async def test_an_event_loop_reads_many_answers_at_once(path: Path) -> None:
    async def read(prompt: str) -> list[RequestOutput]:
        return [output async for output in model.generate(prompt, GREEDY)]

    async with AsyncLLM(path, **SETTINGS) as model:
        [one, two] = await asyncio.gather(read("in the"), read("of a"))
        [alone] = [output async for output in model.chat(CONVERSATION, GREEDY) if output.finished]
        assert one[-1].finished
        assert two[-1].finished
        assert "".join(output.outputs[0].new_text for output in one) == one[-1].outputs[0].text
        assert "in the" in (alone.prompt or "")
        endless = model.generate("in the", ENDLESS)
        await anext(endless)
        await endless.aclose()
        while (load := engine_of(model).load()).num_running + load.num_waiting:  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.001)
    with pytest.raises(PenstockError, match="closed"):
        await anext(model.generate("in the"))


# Encoders.


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return {name: write_encoder(ENCODERS[name], folder / name) for name in ("bert_gguf", "roberta_classes_gguf")}


def test_texts_become_vectors_in_their_order(encoders: dict[str, Path]) -> None:
    """More than are with the engine at once; each has the vector that it has alone."""
    texts = [f"text {i}" for i in range(600)]
    with LLM(encoders["bert_gguf"]) as reader:
        answers = reader.embed(texts)
        for index in (0, 299, 599):
            [alone] = reader.embed(texts[index])
            assert alone.outputs == answers[index].outputs
        [short] = reader.embed(texts[0], dimensions=8)
        [of_ids] = reader.embed(answers[0].prompt_token_ids)
        first, second = (np.array(answer.outputs.embedding) for answer in answers[:2])
        [score] = reader.score(texts[0], texts[1])
    assert of_ids.outputs == answers[0].outputs
    assert np.allclose(np.linalg.norm(first), 1.0)
    assert np.allclose(short.outputs.embedding, first[:8] / np.linalg.norm(first[:8]))
    assert np.isclose(score.outputs.score, first @ second)


@pytest.mark.parametrize(("name", "is_unit"), [("bert", True), ("mpnet", False), ("bert_masked_lm", True)])
def test_vectors_have_the_length_that_the_files_give_them(tmp_path: Path, name: str, is_unit: bool) -> None:
    """The first has a `Normalize` module, the second has modules without it, and the third lists no modules."""
    with LLM(write_encoder(ENCODERS[name], tmp_path / name)) as reader:
        first, second = (np.array(answer.outputs.embedding) for answer in reader.embed(["some text", "another"]))
        [short] = reader.embed("some text", dimensions=8)
        [score] = reader.score("some text", "another")
    lengths = np.linalg.norm([first, second], axis=1)
    assert np.allclose(lengths, 1.0) == is_unit, lengths
    assert np.allclose(short.outputs.embedding, first[:8]) != is_unit
    assert np.isclose(score.outputs.score, first @ second / lengths.prod())


def test_texts_have_the_models_own_prompt_wherever_they_are_asked_for(encoders: dict[str, Path]) -> None:
    texts = ["a first text", "another one"]
    with LLM(encoders["bert_gguf"]) as reader:
        running = running_of(reader)
        told = replace(running.model.encoder, prompts={"document": "of a book: "}, default_prompt="document")
        running.model = replace(running.model, encoder=told)
        first, second = (np.array(answer.outputs.embedding) for answer in reader.embed(texts))
        [score] = reader.score(*texts)
        with pytest.raises(Rejected, match=r"'texts\[0\]' is empty"):
            reader.embed("")
    assert np.isclose(score.outputs.score, first @ second)


def test_a_classifier_has_its_own_prompt(encoders: dict[str, Path]) -> None:
    with LLM(encoders["roberta_classes_gguf"]) as reader:
        [wanted] = reader.classify("of a book: some text")
        running = running_of(reader)
        told = replace(running.model.encoder, prompts={"document": "of a book: "}, default_prompt="document")
        running.model = replace(running.model, encoder=told)
        [found] = reader.classify("some text")
    assert found.outputs == wanted.outputs


def test_a_classifier_names_its_labels(encoders: dict[str, Path]) -> None:
    with LLM(encoders["roberta_classes_gguf"]) as reader:
        [answer] = reader.classify("some text")
        with pytest.raises(PenstockError, match="is for --task classify"):
            reader.embed("some text")
    assert len(answer.outputs.probs) == len(answer.outputs.labels) > 1
    assert np.isclose(sum(answer.outputs.probs), 1.0)
    assert answer.outputs.label in answer.outputs.labels


def test_an_encoder_with_a_vector_for_each_token_says_how_to_get_one_for_a_text(encoders: dict[str, Path]) -> None:
    with LLM(encoders["bert_gguf"], pooling="each") as reader:
        assert reader.score("some text", "some text")
        with pytest.raises(PenstockError, match=r"not for the text\. Set pooling \(--pooling\) to first, last or mean"):
            reader.embed("some text")


def test_a_classifier_of_tokens_classifies_no_texts(tmp_path: Path) -> None:
    """Its head sets the pooling, which `--pooling` can't change."""
    encoder = write_encoder(ENCODERS["bert_tokens"], tmp_path / "encoder")
    wanted = r"has labels for each token, .* Load a model that classifies whole texts\.$"
    with LLM(encoder) as reader, pytest.raises(PenstockError, match=wanted):
        reader.classify("some text")


def test_an_encoder_writes_nothing(encoders: dict[str, Path]) -> None:
    with LLM(encoders["bert_gguf"]) as reader:
        with pytest.raises(PenstockError, match=r"writes none\. Load a model that writes text, or embed texts with this one"):
            reader.generate("Once upon a time")
        with pytest.raises(PenstockError, match="writes none"):
            reader.chat([{"role": "user", "content": "hi"}])


def test_tokens_are_counted_as_they_are_read(encoders: dict[str, Path], model: LLM) -> None:
    with LLM(encoders["bert_gguf"]) as reader:
        running = reader._running
        assert running.model.encoder is not None
        told = replace(running.model.encoder, prompts={"document": "of a book: "}, default_prompt="document")
        running.model = replace(running.model, encoder=told)
        read = [len(one.prompt_token_ids) for one in reader.embed(["some text", "a"])]
        assert reader.num_tokens(["some text", "a"]) == reader.num_tokens(["some text", "a"], prompt_name="document") == read
        with pytest.raises(PenstockError, match="no prompt 'query'"):
            reader.num_tokens("a", prompt_name="query")
    assert model.num_tokens("some text") == [len(model.generate("some text")[0].prompt_token_ids or ())]
    with pytest.raises(PenstockError, match="has no prompts"):
        model.num_tokens("some text", prompt_name="query")


def test_tokens_of_many_texts_are_counted_in_batches(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer needs memory for each character of a batch, and `penstock index` counts a whole file."""
    tokenizer, sizes = model._running.tokenizer, list[int]()
    encode = tokenizer.encode_batch

    def encode_batch(texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        sizes.append(len(texts))
        return encode(texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", encode_batch)
    assert model.num_tokens(["a", "a b c"] * 1000) == model.num_tokens(["a", "a b c"]) * 1000
    assert max(sizes) < 100


def test_a_model_that_writes_embeds_nothing(model: LLM) -> None:
    with pytest.raises(PenstockError, match=r"writes text\. Load an encoder, such as minilm\.$"):
        model.embed("some text")


def test_texts_that_can_not_be_read_are_named(encoders: dict[str, Path]) -> None:
    with LLM(encoders["bert_gguf"]) as reader:
        with pytest.raises(Rejected, match=r"'texts\[1\]' has \d+ tokens"):
            reader.embed(["short", "long " * 400])
        with pytest.raises(Rejected, match=r"'texts\[1\]' is empty"):
            reader.embed(["short", ""])
        with pytest.raises(Rejected, match="vocabulary"):
            reader.embed([[1, 10**6]])
        with pytest.raises(PenstockError, match="2 of text_1 and 3 of text_2"):
            reader.score(["a", "b"], ["a", "b", "c"])
        with pytest.raises(Rejected, match=r"'text_1\[0\]' is empty"):
            reader.score("", "x")
        assert len(reader.embed("long " * 400, truncate_prompt_tokens=-1)) == 1


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda reader: reader.embed(5), "'texts' is of type int"),
        (lambda reader: reader.embed({"text": "a"}), "'texts' is of type dict"),
        (lambda reader: reader.embed(["a", 5]), r"'texts\[1\]' is of type int"),
        (lambda reader: reader.embed(["a", None]), r"'texts\[1\]' is of type NoneType"),
        (lambda reader: reader.embed(["a", b"b"]), r"'texts\[1\]' is neither a text nor token ids"),
        (lambda reader: reader.embed([("a", "b")]), r"'texts\[0\]' is of type tuple\. Give a str, or a list of token ids"),
        (lambda reader: reader.embed("a", prompt_name=5), "no prompt '5'"),
        (lambda reader: reader.embed(["a", [1, "b"]]), r"'texts\[1\]' is neither a text nor token ids"),
        (lambda reader: reader.embed("a", dimensions=3.5), r"'dimensions' is 3\.5; this model's vectors can be cut to 1 to"),
        (
            lambda reader: reader.embed("a", truncate_prompt_tokens=-5),
            "'truncate_prompt_tokens' must be a whole number",
        ),
        (
            lambda reader: reader.embed("a", truncate_prompt_tokens=1.5),
            "'truncate_prompt_tokens' must be a whole number",
        ),
        (lambda reader: reader.score("a", 5), "'text_2' is of type int"),
        (lambda reader: reader.score("a", ["b", 5]), r"'text_2\[1\]' is of type int"),
        (lambda reader: reader.score([1, 2], "a"), r"'text_1\[0\]' is of type list"),
    ],
)
def test_texts_and_fields_of_another_type_are_named(
    encoders: dict[str, Path], ask: Callable[[LLM], object], words: str
) -> None:
    with LLM(encoders["bert_gguf"]) as reader, pytest.raises(PenstockError, match=words):
        ask(reader)


def test_no_texts_have_no_answers(encoders: dict[str, Path]) -> None:
    with LLM(encoders["bert_gguf"]) as reader:
        assert reader.embed([]) == reader.score("a", []) == []


def test_a_model_that_writes_text_embeds_none(model: LLM) -> None:
    with pytest.raises(PenstockError, match="writes text"):
        model.embed("some text")


def test_prompts_have_adapters_by_name(tmp_path: Path) -> None:
    tiny = TinyLlama(max_model_len=512)
    write_hf(tmp_path / "tiny", tiny)
    for seed, name in enumerate(("red", "green"), 1):
        write_adapter(tmp_path / "adapters" / name, factors_of_llama(tiny, seed=seed), lora_alpha=24)
    write_adapter(tmp_path / "adapters" / "wide", factors_of_llama(tiny, rank=9))
    settings = SETTINGS | {"lora_dir": tmp_path / "adapters", "max_lora_rank": 8}
    with LLM(tmp_path / "tiny", **settings) as model:
        names = [None, "red", "green", "red"]
        answers = [answer.outputs[0].token_ids for answer in model.generate(["in the"] * 4, GREEDY, adapter=names)]
        assert answers[1] == answers[3]
        assert len({tuple(answer) for answer in answers}) == 3
        assert model.generate("in the", GREEDY, adapter="green")[0].outputs[0].token_ids == answers[2]
        *_, streamed = model.stream("in the", GREEDY, adapter="green")
        assert streamed.outputs[0].token_ids == answers[2]
        chats = [model.chat(CONVERSATION, GREEDY, adapter=name)[0].outputs[0].token_ids for name in (None, "red")]
        assert chats[0] != chats[1]
        *_, told = model.stream_chat(CONVERSATION, GREEDY, adapter="red")
        assert told.outputs[0].token_ids == chats[1]
        for name, cause in (("mauve", "no adapter 'mauve'"), ("wide", "--max-lora-rank"), (["red", "red"], "1 prompts and 2")):
            with pytest.raises(PenstockError, match=cause) as refused:
                model.generate("in the", GREEDY, adapter=name)
            assert "Ask again" not in str(refused.value)


def test_a_model_without_adapters_says_how_to_name_some(model: LLM) -> None:
    with pytest.raises(PenstockError, match="lora_modules"):
        model.generate("in the", GREEDY, adapter="red")
