"""Formats found by the marks of chat templates, and conversations as templates want them. The templates are short ones in the
manner of the models'."""

import pytest

from penstock.config.components import REASONING_PARSERS, TOOL_PARSERS
from penstock.text.chat import ChatTemplate
from penstock.text.dialects import BY_NAME, GENERIC, REASONING_FORMATS, Message, PastCall, find_dialect, for_template

QWEN = (
    "{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{{ 'return a json object within <tool_call></tool_call> XML tags<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for tool_call in message.tool_calls %}{% set call = tool_call.function %}"
    '\n<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = QWEN + "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
LLAMA = (
    '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary}.'
    "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}"
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>"
    "{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}{% else %}{{ message.content }}{% endif %}'
    "<|eot_id|>{% endfor %}"
)
MISTRAL = (
    "{% for message in messages %}{% if message.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ message.content }}[/INST]"
    "{% elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}{{ (call.function | tojson)[:-1] }}"
    "{% if call.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    ', "id": "{{ call.id }}"}{% endfor %}]'
    "{% elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.tool_call_id }} {{ message.name }}: {{ message.content }}"
    "{% endif %}"
    "{% endfor %}"
)
MAGISTRAL = MISTRAL + "{# [ARGS] [THINK] [/THINK] #}"
PHI4 = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
    "<|system|>{{ message['content'] }}<|tool|>{{ message['tools'] }}<|/tool|><|end|>"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
)
GRANITE = (
    "{% if tools %}{{ tools | tojson }} <|tool_call|>{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"
)
GPT_OSS = (
    "{% if tools %}namespace functions {% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "effort {{ reasoning_effort }} {% for message in messages %}{% if message.tool_calls %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>"
    "<|start|>assistant to=functions.{{ message.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ message.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|start|>{{ message.role }}<|message|>"
    "{{ message.content }}<|end|>{% endif %}{% endfor %}"
)
SMOLLM3 = "{% if xml_tools %}{{ xml_tools | tojson }} <tool_call></tool_call>{% endif %}{# </think> #}"
DEEPSEEK = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{% for tool in message['tool_calls'] %}"
    "{{ '<tool_call>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] + '</tool_call>' }}"
    "{% endfor %}{% endfor %}"
)
PLAIN = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
GEMMA = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
MISTRAL_V1 = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' if message['role'] == 'user' else message['content'] }}{% endfor %}"
)
PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] + '<|end|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)
QWEN_CODER = (
    "{% if tools %}{{ tools | tojson }} <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>{% endif %}"
    "{% for message in messages %}{% for tool_call in message.tool_calls %}{% set tool_call = tool_call.function %}"
    "{{ '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}{% for name, value in tool_call.arguments | items %}"
    "{{ '<parameter=' + name + '>\n' + value | string + '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}{% endfor %}"
)
GLM = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>{% endif %}"
    "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for tc in m.tool_calls %}{% set tc = tc.function %}{{ '\n<tool_call>' + tc.name }}\n"
    "{% for k, v in tc.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}"
    "</tool_call>{% endfor %}{% endfor %}"
)
SEED = (
    "{%- set begin = '<seed:tool_call>' -%}{%- set end = '</seed:think>' -%}{% for item in tools %}{{ item.function.name }}"
    "{% endfor %}{% for message in messages %}{% for call in message.tool_calls %}{% set call = call.function %}"
    "{{ begin + '\n<function=' + call.name + '>\n' }}{% for name, value in call.arguments | items %}"
    "{{ '<parameter=' + name + '>' + value + '</parameter>\n' }}{% endfor %}</function>\n</seed:tool_call>"
    "{% endfor %}{% endfor %}"
)
MINIMAX = (
    "{%- set begin = '<minimax:tool_call>' -%}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{% if message.tool_calls %}{{ begin }}\n{% for call in message.tool_calls %}{% set call = call.function %}"
    "{{ '<invoke name=\"' + call.name + '\">\n' }}{% for k, v in call.arguments | items %}"
    "{{ '<parameter name=\"' + k + '\">' + v + '</parameter>\n' }}{% endfor %}{{ '</invoke>\n' }}{% endfor %}"
    "</minimax:tool_call>{% endif %}{% endfor %}<think>\n</think>"
)
NEMOTRON = (
    "{% if tools %}<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>{% endif %}{% for message in messages %}"
    '{% for call in message.tool_calls %}<TOOLCALL>[{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}' }}]</TOOLCALL>{% endfor %}{% endfor %}{{ '<think></think>' }}"
)
APRIEL = (
    "{% if tools %}{{ tools }}Return all function calls as a list of json objects within <tool_call></tool_call> XML tags.\n"
    '<tool_calls>[{"name": <function-name-1>, "arguments": <args-dict-1>},...]</tool_calls>{% endif %}'
    "{% for message in messages %}{{ message.content }}{% if message.tool_calls %}{{ '\n<tool_calls>[' }}"
    "{% for call in message.tool_calls %}{{ '{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ ', \"id\": \"' + call['id'] + '\"}' }}{% endfor %}]</tool_calls>{% endif %}"
    "{% endfor %}"
)
DEEPSEEK_V3_1 = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{% for tool in message['tool_calls'] %}"
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' "
    "+ tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}{% endfor %}{% endfor %}{{ '<｜tool▁calls▁end｜></think>' }}"
)
DEEPSEEK_V3 = DEEPSEEK_V3_1.replace(
    "+ tool['function']['arguments'] ", "+ '\n```json\n' + tool['function']['arguments'] + '\n```' "
)
GEMMA4 = (
    "{% if enable_thinking %}{{ '<|turn>system\n<|think|><turn|>\n' }}{% endif %}"
    + PLAIN
    + "{{ '<|channel>thought\n<channel|>' }}"
)
FOUND = {
    "qwen": (QWEN, "hermes", None),
    "qwen3": (QWEN3, "hermes", "think"),
    "llama": (LLAMA, "llama3_json", None),
    "mistral": (MISTRAL, "mistral", None),
    "magistral": (MAGISTRAL, "mistral_args", "mistral"),
    "phi4": (PHI4, "phi4_mini_json", None),
    "granite": (GRANITE, "granite", None),
    "gpt-oss": (GPT_OSS, "openai", "openai"),
    "smollm3": (SMOLLM3, "hermes", "think"),
    "plain": (PLAIN, "generic", None),
    "gemma": (GEMMA, "generic", None),
    "qwen coder": (QWEN_CODER, "qwen3_coder", None),
    "glm": (GLM, "glm45", "think"),
    "seed-oss": (SEED, "seed_oss", "seed_oss"),
    "minimax": (MINIMAX, "minimax_m2", "think"),
    "deepseek v3": (DEEPSEEK_V3, "deepseek_v3", "think"),
    "deepseek v3.1": (DEEPSEEK_V3_1, "deepseek_v31", "think"),
    "gemma 4": (GEMMA4, "generic", "gemma4"),
    "nemotron": (NEMOTRON, "nemotron_json", "think"),
    "apriel": (APRIEL, "apriel", None),
    "none": (None, "generic", None),
}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
HISTORY = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="What time is it?"),
    Message(role="assistant", calls=(PastCall("call_1", "now", {"zone": "ü"}),), reasoning="Look."),
    Message(role="tool", content="noon", call_id="call_1"),
    Message(role="tool", content="12:00", call_id="call_1"),
]


@pytest.mark.parametrize("model", FOUND)
def test_a_template_shows_its_formats(model):
    template, tools, reasoning = FOUND[model]
    dialect = find_dialect(template)
    assert dialect.tools.name == tools
    assert (dialect.reasoning and dialect.reasoning.name) == reasoning
    assert (dialect.tools_variable is None) == (tools == "generic")


@pytest.mark.parametrize(
    ("template", "variable"),
    [
        (QWEN3, "enable_thinking"),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", "thinking"),
        ("{% if message.prefix and thinking %}<think>{% endif %}", "thinking"),
        (GPT_OSS, None),
        ("{% set thinking = thinking | default(false) %}{% if (thinking) %}<think>{% endif %}", "thinking"),
        ("{% if 'thinking' in message and not message.thinking %}thinking{% endif %}", None),
        ("{% set thinking = message.reasoning %}{% if thinking %}<think>{{ thinking }}{% endif %}", None),
        ("{% for thinking in message.thoughts if thinking %}{{ thinking }}{% endfor %}", None),
        ("{{ 'Don\\'t say if thinking helps.' }}", None),
        ("{% set ns = namespace(enable_thinking=true) %}{% if ns.enable_thinking %}<think>{% endif %}", None),
        ("{{ 'Write }} and ' + \"don't\" }}{% if enable_thinking %}{{ 'ok' }}{% endif %}", "enable_thinking"),
        ("{{ 'enable_thinking' }}{# {{ enable_thinking }} #}", None),
        (PLAIN, None),
    ],
)
def test_the_switch_of_reasoning_is_the_template_s(template, variable):
    assert find_dialect(template).thinking_variable == variable


def test_a_variable_is_what_the_template_s_code_reads():
    only_xml = "{% for tool in xml_tools %}{{ 'Within <tools></tools>: ' + tool | string }}<tool_call></tool_call>{% endfor %}"
    assert find_dialect(only_xml).tools_variable == "xml_tools"
    assert find_dialect("{{ '<tools> <tool_call></tool_call>' }}").tools is GENERIC
    assert find_dialect("{% if reasoning_effort == 'low' %}{% endif %}").takes_effort
    assert not find_dialect("{{ 'reasoning_effort' }}").takes_effort


def test_a_setting_goes_before_what_the_template_shows():
    assert find_dialect(QWEN, tool_parser="mistral").tools.name == "mistral"
    assert find_dialect(QWEN3, reasoning_parser="none").reasoning is None
    assert find_dialect(QWEN, reasoning_parser="think").reasoning is not None


def test_the_settings_name_every_format():
    assert {*TOOL_PARSERS} == {"auto", *BY_NAME}
    assert {*REASONING_PARSERS} == {"auto", "none", *(one.name for one in REASONING_FORMATS)}


def rendered(template, messages=HISTORY, tools=(TOOL,), **more):
    told, variables = for_template(messages, tools, find_dialect(template))
    return ChatTemplate(template, special_tokens={}).render(told, add_generation_prompt=False, **variables, **more)


def test_templates_get_what_they_want():
    text = rendered(QWEN)
    assert text.startswith("<|im_start|>system\n# Tools\n" + '{"type": "function", "function": {"name": "now"')
    assert '<tool_call>\n{"name": "now", "arguments": {"zone": "ü"}}\n</tool_call>' in text
    assert '{"name": "now", "parameters": {"zone": "ü"}}' in rendered(LLAMA)
    assert "<|tool|>[{" in (phi4 := rendered(PHI4))
    assert phi4.startswith("<|system|>Be brief.<|tool|>")
    assert rendered(PHI4, HISTORY[1:2]).startswith('<|system|><|tool|>[{"name": "now"')
    assert '<tool_call>now\n{"zone": "ü"}</tool_call>' in rendered(DEEPSEEK)
    assert "<tool_call>\n<function=now>\n<parameter=zone>\nü\n</parameter>\n</function>\n</tool_call>" in rendered(QWEN_CODER)
    assert "<think>Look.</think>\n<tool_call>now\n<arg_key>zone</arg_key>\n<arg_value>ü</arg_value>\n</tool_call>" in rendered(
        GLM
    )
    assert "<seed:tool_call>\n<function=now>\n<parameter=zone>ü</parameter>\n</function>\n</seed:tool_call>" in rendered(SEED)
    assert '<invoke name="now">\n<parameter name="zone">ü</parameter>\n</invoke>\n</minimax:tool_call>' in rendered(MINIMAX)
    assert 'now<｜tool▁sep｜>{"zone": "ü"}<｜tool▁call▁end｜>' in rendered(DEEPSEEK_V3_1)
    assert '```json\n{"zone": "ü"}\n```<｜tool▁call▁end｜>' in rendered(DEEPSEEK_V3)
    assert '<TOOLCALL>[{"name": "now", "arguments": {"zone": "ü"}}]</TOOLCALL>' in rendered(NEMOTRON)
    assert '<tool_calls>[{"name": "now", "arguments": {"zone": "ü"}, "id": "call_1"}]</tool_calls>' in rendered(APRIEL)
    oss = rendered(GPT_OSS, reasoning_effort="low")
    assert "effort low" in oss
    assert "<|channel|>analysis<|message|>Look.<|end|>" in oss
    assert 'to=functions.now<|channel|>commentary json<|message|>{"zone": "ü"}' in oss


def test_templates_that_take_one_call_get_a_message_for_each():
    calls = tuple(PastCall(f"c{nth}", "now", {"n": nth}) for nth in range(3))
    results = [Message(role="tool", content=f"r{nth}", call_id=f"c{nth}") for nth in (2, 0, 1)]
    messages = [
        Message(role="assistant", content="So:", reasoning="Hm.", calls=calls),
        *results,
        Message(role="user", content="?"),
    ]
    for template in (LLAMA, GPT_OSS):
        told, _ = for_template(messages, [TOOL], find_dialect(template))
        calls_and_results = [one.get("tool_call_id") or one["tool_calls"][0]["id"] for one in told[:-1]]
        assert calls_and_results == ["c0", "c0", "c1", "c1", "c2", "c2"]
        assert [one["content"] for one in told[1::2][:3]] == ["r0", "r1", "r2"]
    assert (told[0]["content"], told[0]["thinking"]) == ("", "Hm.\n\nSo:")
    told, _ = for_template(messages, [TOOL], find_dialect(QWEN))
    assert [len(one.get("tool_calls", ())) for one in told] == [3, 0, 0, 0, 0]


def test_calls_with_equal_ids_have_each_result_once():
    calls = tuple(PastCall("c", "now", {}) for _ in range(3))
    results = [Message(role="tool", call_id="c", content=f"r{idx}") for idx in range(3)]
    told, _ = for_template([Message(role="assistant", calls=calls), *results], [TOOL], find_dialect(LLAMA))
    assert [one["content"] for one in told if one["role"] == "tool"] == ["r0", "r1", "r2"]
    assert [len(one["tool_calls"]) for one in told if one["role"] == "assistant"] == [1, 1, 1]


def test_ids_have_the_form_of_the_template_and_results_the_name_of_their_tool():
    text = rendered(MISTRAL)
    call_id = text.partition('"id": "')[2][:9]
    assert call_id.isalnum()
    assert text.count(f"[TOOL_RESULTS]{call_id} now: ") == 2
    kept = [Message(role="assistant", calls=(PastCall("abcDEF123", "now", {}),))]
    assert '"id": "abcDEF123"' in rendered(MISTRAL, kept)


def test_calls_are_content_where_the_template_shows_none():
    calls = (PastCall("c0", "now", {}), PastCall("c1", "now", {"zone": "ü"}))
    text = rendered(GRANITE, [Message(role="assistant", content="So:", calls=calls), HISTORY[3]])
    assert text.endswith(
        'So:\n<|tool_call|>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {"zone": "ü"}}]noon'
    )
    text = rendered(SMOLLM3 + PLAIN + "{{ '<tool_calls>' }}")
    assert '<|assistant|><tool_call>\n{"name": "now", "arguments": {"zone": "ü"}}\n</tool_call>\n<|tool|>noon' in text


def test_a_template_that_knows_no_tools_sees_plain_messages():
    text = rendered(PLAIN)
    assert text.startswith("<|system|>Be brief.\n\nYou can call tools.")
    assert '<|assistant|><tool_call>\n{"name": "now", "arguments": {"zone": "ü"}}\n</tool_call>\n' in text
    assert "<|user|><tool_response>\nnoon\n</tool_response>\n<tool_response>\n12:00\n</tool_response>\n" in text
    assert rendered(PLAIN, HISTORY[1:2]).startswith("<|system|>You can call tools.")
    assert rendered(PLAIN, HISTORY[1:2], tools=()) == "<|user|>What time is it?\n"


def test_where_no_system_message_is_taken_tools_are_told_by_the_user():
    text = rendered(GEMMA, HISTORY[1:])
    assert text.startswith("<|user|>You can call tools.")
    assert rendered(PHI3, HISTORY[1:2]).startswith("<|user|>You can call tools.")
    assert rendered(MISTRAL_V1, HISTORY[1:2]).startswith("[INST] You can call tools.")
    assert "\n\nWhat time is it?" in text
    assert find_dialect(GEMMA).tools is GENERIC
