"""Chat templates: what they may use, how they fail, and that they stay within bounds."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from functools import lru_cache
from pathlib import Path

import pytest

from penstock.machine import is_free_threaded
from penstock.text.builtin_templates import BUILTIN_TEMPLATES
from penstock.text.chat import ChatTemplate, choose_chat_template, require_chat_template
from penstock.types.errors import ConfigError, Rejected, RejectReason

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HELLO = [{"role": "user", "content": "hello"}]


def make(source: str, **options) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, **options)


kept = lru_cache(maxsize=2)(make)
"""Most of the time goes into starting a process, so the next test of the same template finds it running."""


def render(source: str, messages=HELLO, /, **options) -> str:
    return kept(source).render(messages, **options)


def rejection(source: str, messages=HELLO, /, **options) -> Rejected:
    with pytest.raises(Rejected) as caught:
        render(source, messages, **options)
    assert caught.value.reason is RejectReason.INVALID
    return caught.value


def test_messages_become_a_prompt_that_asks_for_a_reply():
    assert render(CHATML) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hello</s>"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks, lstrip_blocks
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}", "13"),
        ("{% for m in [1, 2, 3] %}{{ m }}{% break %}{% endfor %}", "1"),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hello!"),
        ("{% set ns = namespace(n=0) %}{% for m in range(4) %}{% set ns.n = ns.n + m %}{% endfor %}{{ ns.n }}", "6"),
        ("{{ strftime_now('%d %b %Y') }}", "09 Feb 2031"),
        ("{{ date_string }}, {{ datetime }}", "09 Feb 2031, Feb 09 2031"),  # llama.cpp's
        ("{{ dict(a=1).a }}{{ missing }}{{ tools is none }}{{ documents is none }}", "1TrueTrue"),
        ("{% macro twice(x) %}{% for i in range(2) %}{{ x }}{% endfor %}{% endmacro %}{{ twice('ab') }}", "abab"),
        ("{{ 'ab' * 3 }}{{ 2 * 3 }}", "ababab6"),
        ("{{ messages[0].content.strip().split('l') | join('-') }}", "he--o"),
    ],
)
def test_templates_may_use_what_transformers_gives_them(source, expected):
    template = make(source, now=lambda: datetime(2031, 2, 9))
    assert template.render(HELLO) == expected


def test_tools_are_also_given_as_text():
    assert json.loads(render("{{ functions }}", tools=[{"a": "é"}])) == [{"a": "é"}]
    assert render("{{ functions is defined }}") == "False"


def test_a_user_s_text_is_never_a_template():
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "{{ 7 * 7 }}{% x %}"}]) == "{{ 7 * 7 }}{% x %}"


def test_further_variables_reach_the_template():
    assert render("{{ enable_thinking }}{{ tools[0].name }}", enable_thinking=False, tools=[{"name": "f"}]) == "Falsef"


@pytest.mark.parametrize("name", ["messages", "bos_token"])
def test_variables_cannot_replace_the_template_s_own(name):
    error = rejection(CHATML, **{name: "x"})
    assert name in error.detail
    assert error.param == "chat_template_kwargs"


def test_variables_may_have_the_names_of_python_s_own_arguments():
    assert render("{{ messages[0].content }}", **{"self": 1, "context": 2, "source": 3}) == "hello"


def test_variables_cannot_replace_range():
    assert render("{{ range(2) | list }}", range="no") == "[0, 1]"


class TestContinuing:
    MESSAGES = (*HELLO, {"role": "assistant", "content": "Once upon "})

    def test_the_last_message_is_left_open(self):
        text = render(CHATML, self.MESSAGES, add_generation_prompt=False, continue_final_message=True)
        assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nOnce upon "

    def test_a_template_that_trims_also_trims_the_open_message(self):
        source = CHATML.replace("message.content", "message.content | trim")
        text = render(source, self.MESSAGES, add_generation_prompt=False, continue_final_message=True)
        assert text.endswith("<|im_start|>assistant\nOnce upon")

    @pytest.mark.parametrize("content", ["", " \n"])
    def test_a_message_without_words_leaves_the_template_s_own_white_space(self, content):
        source = CHATML.replace("message.content", "message.content | trim")
        messages = [*HELLO, {"role": "assistant", "content": content}]
        text = render(source, messages, add_generation_prompt=False, continue_final_message=True)
        assert text.endswith("<|im_start|>assistant\n")

    def test_the_caller_s_messages_are_not_changed(self):
        render(CHATML, self.MESSAGES, add_generation_prompt=False, continue_final_message=True)
        assert self.MESSAGES[-1]["content"] == "Once upon "

    def test_continuing_and_beginning_a_reply_exclude_each_other(self):
        error = rejection(CHATML, self.MESSAGES, continue_final_message=True)
        assert error.param == "continue_final_message"

    def test_a_message_without_text_cannot_be_continued(self):
        messages = [*HELLO, {"role": "assistant", "content": None}]
        error = rejection(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
        assert error.param == "messages"

    def test_a_template_that_hides_the_last_message_is_told(self):
        error = rejection("{{ messages[0].role }}", self.MESSAGES, add_generation_prompt=False, continue_final_message=True)
        assert "does not show the last message" in error.detail


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[0].nothing.more }}", "fails on these messages: UndefinedError: 'dict object' has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        ("{{ messages | tojson(indent={}) }}", "TypeError"),
    ],
)
def test_a_template_that_fails_rejects_the_messages(source, message):
    error = rejection(source)
    assert message in error.detail
    assert error.param == "messages"


def test_no_messages_are_rejected():
    assert rejection(CHATML, []).param == "messages"


ESCAPES = (
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ raise_exception.__globals__.os }}",
    "{{ dict.__subclasses__() }}",
    "{{ lipsum() }}",
    "{{ range.__call__.__globals__ }}",
    "{% include 'x' %}",
    "{{ self.__init__.__globals__ }}",
    "{{ ('%s' | attr('format')).__globals__.os }}",
)


@pytest.mark.parametrize("number", range(len(ESCAPES)), ids=ESCAPES)
def test_templates_stay_in_their_sandbox(number):
    """One process tries all of them, each when the first message has its number."""
    tries = (f"{{% if messages[0].content == '{idx}' %}}{escape}{{% endif %}}" for idx, escape in enumerate(ESCAPES))
    source = "".join(tries) + "ok"
    assert render(source) == "ok"
    rejection(source, [{"role": "user", "content": str(number)}])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{{ messages[0].content }}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(0) %}{% endfor %}{% endfor %}",
        "{{ range(1000000) | list }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 9 ** 99999999 }}",
    ],
)
def test_templates_cannot_explode(source):
    with pytest.raises(Rejected):
        make(source, max_chars=10_000).render(HELLO)


BOMBS = {
    "nested loops": "{% set l = range(3000) | list %}{% for a in l %}{% for b in l %}{% for c in l %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "center": "{{ messages[0].content.center(3000000000) }}",
    "a format's width": "{{ '%03000000000d' % messages | length }}",
    "doubling": "{% set ns = namespace(s='x' * 9999) %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a growing list": "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "replace": "{{ ('x' * 9000) | replace('', 'y' * 90000) }}",
    "indent": "{{ messages | tojson(indent=2000000000) }}",
    "a large number": "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
}


def resident_bytes(pid: int) -> int:
    """The most that a process ever had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def ends(pid: int, *, within_s: float) -> bool:
    """Not by a pidfd, which not every build of Python has."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.001)
    return False


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_ends_at_its_limits_and_the_next_conversation_is_served(bomb):
    source = "{% if messages[0].content == 'boom' %}" + BOMBS[bomb] + "{% endif %}ok"
    template = make(source, max_s=0.3, max_memory_bytes=128 << 20)
    before_bytes, begin_s = resident_bytes(os.getpid()), time.monotonic()
    with pytest.raises(Rejected, match=r"needs more than (0\.3 s|128 MiB of memory) for these messages") as caught:
        template.render([{"role": "user", "content": "boom"}])
    assert caught.value.reason is RejectReason.INVALID
    assert caught.value.param == "messages"
    assert time.monotonic() - begin_s < 10
    assert resident_bytes(os.getpid()) - before_bytes < 64 << 20
    assert template.render(HELLO) == "ok"
    assert resident_bytes(template.pid) < 128 << 20


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'a' | center(3000000000) }}", ""),  # Jinja2 works out at once what is constant
        ("{{ '%03000000000d' % 1 }}", ""),
        ("{{ " + "9" * 4000 + (" * " + "9" * 4000) * 4000 + " }}", "cannot be compiled: that needs more than"),
        ("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "nested too deeply"),
        ("{% for a in [] %}" * 30 + "{% endfor %}" * 30, "cannot be compiled"),
    ],
)
def test_compiling_is_limited_as_well(source, message):
    before_bytes = resident_bytes(os.getpid())
    if message:
        with pytest.raises(ConfigError, match=message):
            make(source, max_s=0.5, max_memory_bytes=128 << 20)
    else:
        make(source, max_s=0.5, max_memory_bytes=128 << 20)
    assert resident_bytes(os.getpid()) - before_bytes < 64 << 20


class TestTheProcess:
    def test_it_inherits_no_descriptors_and_no_environment(self):
        template = make("ok")
        process = Path(f"/proc/{template.pid}")
        assert {path.name for path in (process / "fd").iterdir()} == {"0", "1", "2"}
        names = {line.split("=")[0] for line in (process / "environ").read_text().split("\0") if line}
        assert names - {"LD_LIBRARY_PATH"} == {"MIMALLOC_ARENA_RESERVE"}

    def test_it_is_small(self):
        template = make(CHATML)
        template.render(HELLO)
        assert resident_bytes(template.pid) < (40 if is_free_threaded() else 30) << 20  # its objects are larger

    def test_it_ends_with_the_template(self):
        template = make("ok")
        process = Path(f"/proc/{template.pid}")
        assert process.exists()
        del template
        assert not process.exists()

    def test_it_ends_with_the_server_even_in_the_middle_of_a_rendering(self):
        code = (
            "import os, threading; from penstock.text.chat import ChatTemplate; "
            "t = ChatTemplate(input(), special_tokens={}, max_s=0.5); print(t.pid, flush=True); "
            "threading.Timer(0.1, os._exit, [0]).start(); t.render([{}])"
        )
        source = BOMBS["nested loops"]
        server = subprocess.run([sys.executable, "-c", code], input=source, capture_output=True, text=True, check=True)
        assert ends(int(server.stdout), within_s=10)

    def test_it_outlives_signals_that_are_for_the_whole_server(self):
        template = make("ok")
        pid = template.pid
        os.kill(pid, signal.SIGTERM)
        assert template.render(HELLO) == "ok"
        assert template.pid == pid
        assert os.getpgid(pid) != os.getpgid(os.getpid())  # which Ctrl-C in a terminal goes to

    def test_one_that_was_killed_is_replaced(self):
        template = make("ok")
        os.kill(template.pid, signal.SIGKILL)
        assert ends(template.pid, within_s=10)
        assert template.render(HELLO) == "ok"

    def test_one_that_is_lost_in_a_rendering_is_not_the_client_s_fault(self):
        template = make(BOMBS["nested loops"], max_s=60)
        killer = threading.Timer(0.1, os.kill, [template.pid, signal.SIGKILL])
        killer.start()
        with pytest.raises(Rejected) as caught:
            template.render(HELLO)
        killer.join()
        assert caught.value.reason is RejectReason.UNAVAILABLE
        assert caught.value.retry_after_s

    def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next(self):
        slow = "{% if messages[0].content == 'old' %}" + BOMBS["nested loops"] + "{% endif %}{{ messages[0].content }}"
        template = make(slow, max_s=60)
        ctrl_c = threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
        ctrl_c.start()
        with pytest.raises(KeyboardInterrupt):
            template.render([{"role": "user", "content": "old"}])
        ctrl_c.join()
        assert template.render(HELLO) == "hello"

    def test_its_timer_works_though_the_server_was_told_to_ignore_it(self):
        code = (
            "import signal; signal.signal(signal.SIGPROF, signal.SIG_IGN); "
            "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF}); from penstock.text.chat import ChatTemplate; "
            "ChatTemplate(input(), special_tokens={}, max_s=0.3).render([{}])"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, input=BOMBS["nested loops"], capture_output=True, text=True, check=False, timeout=60)
        assert "needs more than 0.3 s" in done.stderr

    def test_time_in_which_it_has_no_core_does_not_count(self):
        inner = "{% for b in range(200) %}{% if ('ab' * 2000)|upper == b %}{% endif %}{% endfor %}"
        work = "{% for a in range(100) %}" + inner + "{% endfor %}ok"
        template = make(work, max_s=0.5)
        pid = template.pid
        timers = [threading.Timer(0.05, os.kill, [pid, signal.SIGSTOP]), threading.Timer(0.8, os.kill, [pid, signal.SIGCONT])]
        for timer in timers:
            timer.start()
        assert template.render(HELLO) == "ok"
        for timer in timers:
            timer.join()

    def test_one_that_cannot_be_started_is_told(self, monkeypatch):
        monkeypatch.setattr(sys, "executable", "/no/such/python")
        with pytest.raises(ConfigError, match="cannot be started"):
            make("ok")

    def test_the_kernel_knows_its_limits(self):
        template = make("ok", max_memory_bytes=100 << 20)
        assert resource.prlimit(template.pid, resource.RLIMIT_AS) == (100 << 20, 100 << 20)


def test_text_that_is_no_unicode_comes_through():
    """The tokenizer refuses it, and says where it is."""
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "a\ud800b\U0001f600"}]) == "a\ud800b\U0001f600"


def test_the_budget_of_one_rendering_is_not_taken_from_the_next():
    template = make("{% for i in range(60000) %}{% endfor %}ok")
    assert [template.render(HELLO) for _ in range(3)] == ["ok"] * 3


def test_messages_that_are_too_long_are_rejected_with_the_bound():
    template = make(CHATML, max_chars=1000)
    with pytest.raises(Rejected, match="more than 1000 characters"):
        template.render([{"role": "user", "content": "x" * 1001}])


@pytest.mark.parametrize("source", ["ok\n{% for m in messages %}", "ok\n{{ 1 + }}", "ok\n{{ x | nofilter }}"])
def test_a_bad_template_is_refused_at_start_with_its_line(source):
    with pytest.raises(ConfigError, match="line 2"):
        make(source)


def test_a_model_without_a_template_is_refused_with_the_remedy():
    with pytest.raises(Rejected, match=r"or only named ones.* --chat-template, which takes a name"):
        require_chat_template(choose_chat_template(None, {"tool_use": CHATML, "chat": CHATML}))
    template = make(CHATML)
    assert require_chat_template(template) is template


def test_the_template_option_is_a_name_a_path_or_the_template_itself(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}é", encoding="utf-8")
    named = {"default": "plain", "rag": "with documents"}
    assert choose_chat_template(None, named) == "plain"
    assert choose_chat_template(None, {"rag": "with documents"}) is None
    assert choose_chat_template("rag", named) == "with documents"
    assert choose_chat_template(str(path), named) == "{{ messages }}é"
    assert choose_chat_template("{% if x %}{% endif %}", named) == "{% if x %}{% endif %}"
    with pytest.raises(ConfigError, match=r"takes the path .* built-in one \(chatml, .* has for one: default, rag\."):
        choose_chat_template("tool_use", named)
    with pytest.raises(ConfigError, match="it has none"):
        choose_chat_template(str(tmp_path / "absent"), {})
    path.write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        choose_chat_template(str(path), named)


TURNS = [
    {"role": "system", "content": "Sys"},
    {"role": "user", "content": "A"},
    {"role": "assistant", "content": "B"},
    {"role": "user", "content": "C"},
]


PROMPTS = {
    "chatml": "<|im_start|>system\nSys<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
    "<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n",
    "deepseek3": "<s>Sys\n\n<｜User｜>A<｜Assistant｜>B<｜end▁of▁sentence｜><｜User｜>C<｜Assistant｜>",
    "gemma": "<s><start_of_turn>user\nSys\n\nA<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n"
    "<start_of_turn>user\nC<end_of_turn>\n<start_of_turn>model\n",
    "llama2": "<s>[INST] <<SYS>>\nSys\n<</SYS>>\n\nA [/INST] B </s><s>[INST] C [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nSys<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nA"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nC<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral-v7": "<s>[SYSTEM_PROMPT] Sys[/SYSTEM_PROMPT][INST] A[/INST] B</s>[INST] C[/INST]",
    "phi3": "<s><|system|>\nSys<|end|>\n<|user|>\nA<|end|>\n<|assistant|>\nB<|end|>\n<|user|>\nC<|end|>\n<|assistant|>\n",
    "vicuna": "<s>Sys\n\nUSER: A\nASSISTANT: B</s>\nUSER: C\nASSISTANT:",
    "zephyr": "<s><|system|>\nSys</s>\n<|user|>\nA</s>\n<|assistant|>\nB</s>\n<|user|>\nC</s>\n<|assistant|>\n",
}  # fmt: skip


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_templates_that_are_built_in_write_the_prompts_of_their_families(name):
    source = choose_chat_template(name, {})
    template = make(source)
    assert template.render(TURNS) == PROMPTS[name]
    names = {"s": "system", "a": "assistant", "u": "user"}
    for roles in ("s", "sau", "us", "su"):
        text = template.render([{"role": names[role], "content": f"[{role}]"} for role in roles])
        assert [text.count(f"[{role}]") for role in roles] == [1] * len(roles), f"a message of {roles} is left out"
    bare = ChatTemplate(source, special_tokens={})  # a model without these tokens
    assert bare.render(TURNS) == PROMPTS[name].replace("<s>", "").replace("</s>", "")
    assert choose_chat_template(name, {name: "the model's"}) == "the model's"


def test_doubled_braces_in_a_model_s_instructions_for_calls_are_made_single(tmp_path, caplog):
    """Qwen2.5-Coder's template shows a call with doubled braces, and the model writes what it was shown."""
    shown = r"{\"name\": <function-name>, \"arguments\": <args-json-object>}"
    wrong, right = (f'{{{{- "<tool_call>\\n{call}\\n</tool_call>" }}}}' for call in ("{" + shown + "}", shown))
    with caplog.at_level("INFO"):
        assert choose_chat_template(None, {"default": wrong}) == right
    [record] = caplog.records
    assert "doubled braces" in record.message
    assert make(right).render(HELLO) == '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    assert choose_chat_template("default", {"default": wrong}) == right
    assert choose_chat_template(None, {"default": right}) == right
    path = tmp_path / "own.jinja"
    path.write_text(wrong)
    assert choose_chat_template(str(path), {}) == wrong  # a template that somebody chose stays as it is


@pytest.mark.parametrize(
    ("begin", "end"), [("", ""), ("\n", "\n"), ("{% macro say(x) %}{{ x }}{% endmacro %}\n", "\n\n"), ("", "\n")]
)
def test_a_template_for_tools_is_taken_where_there_are_some(begin, end):
    plain = begin + "{% for m in messages %}{{ m.content }}{% endfor %}" + end
    with_tools = begin + "{{ tools | tojson }}{{ messages[0].content }}" + end
    template = make(choose_chat_template(None, {"default": plain, "tool_use": with_tools}))
    assert template.render(HELLO) == template.render(HELLO, tools=[]) == render(plain)
    assert template.render(HELLO, tools=[{"a": 1}]) == render(with_tools, tools=[{"a": 1}])
    assert choose_chat_template("default", {"default": plain, "tool_use": with_tools}) == plain
    assert choose_chat_template(None, {"tool_use": with_tools}) is None


def test_the_server_does_not_import_jinja():
    code = (
        "import sys; from penstock.text.chat import ChatTemplate; ChatTemplate('ok', special_tokens={}).render([{}]); "
        "sys.exit('jinja2' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
