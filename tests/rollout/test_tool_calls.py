"""Every form that models write, and what is no call."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_megatron.rollout.tool_calls import ToolCall, parse_action, parse_tool_calls

F1 = ToolCall("f", {"x": 1})
G = ToolCall("g", {})


def test_recorded_parses_are_all_equal(trace_data):
    rows = [json.loads(line) for line in (trace_data / "grading" / "tool_call_parse.jsonl").read_text().splitlines()]
    assert len(rows) >= 16
    for row in rows:
        content, calls = parse_tool_calls(row["text"])
        found = [{"name": call.name, "arguments": call.arguments} for call in calls]
        assert (content, found) == (row["content"], row["tool_calls"]), row["id"]


def test_ground_truth_rendered_by_the_template_reads_back(trace_data):
    path = trace_data / "rollouts" / "tool_calls_bfcl_ground_truth.jsonl"
    num_calls = 0
    for row in map(json.loads, path.read_text().splitlines()):
        expected = [
            [
                ToolCall(call["function"]["name"], call["function"]["arguments"])
                for call in message.get("tool_calls", ())
            ]
            for message in row["messages"]
            if message["role"] == "assistant"
        ]
        turns = row["rendered_qwen3_after_tools"].split("<|im_start|>assistant\n")[1:]
        assert [parse_tool_calls(turn.split("<|im_end|>")[0])[1] for turn in turns] == expected
        num_calls += sum(map(len, expected))
    assert num_calls >= 50


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", None, []),
        ("12 < 13", "12 < 13", []),
        # Hermes and Qwen
        ('a\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\nb', "a\nb", [F1]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}<tool_call>{"name": "g"}</tool_call>', None, [F1, G]),
        ('<tool_call>{"name":"f","arguments":{"x":1}}\n{"name":"g","arguments":{}}</tool_call>', None, [F1, G]),
        ('<tool_call>[{"name":"f","arguments":{"x":1}}, {"name":"g"}]</tool_call>', None, [F1, G]),
        ('<tool_call>```json\n{"name":"f","arguments":{"x":1}}\n```</tool_call>', None, [F1]),
        ('<tool_call>{"name":"f","arguments":{"x":1}}}</tool_call>', None, [F1]),
        ("<tool_call>{'name': 'f', 'arguments': {'x': 1}}</tool_call>", None, [F1]),
        ("<tool_call>{'name': 'f', 'arguments': {'x': True,}}</tool_call>", None, [ToolCall("f", {"x": True})]),
        ('<tool_call>{"name":"f","arguments":null}</tool_call>', None, [ToolCall("f", {})]),
        ('<tool_call>{"name":"f","parameters":{"x":1}}</tool_call>', None, [F1]),
        ('<tool_call>{"type":"function","function":{"name":"f","arguments":"{\\"x\\": 1}"}}</tool_call>', None, [F1]),
        (
            '<tool_call>{"name":"python","arguments":{"code":"a\nprint(\'</tool_call>\')"}}</tool_call>',
            None,
            [ToolCall("python", {"code": "a\nprint('</tool_call>')"})],
        ),
        ('<tool_call>{"name":"f","arguments":"[1, 2]"}</tool_call>', None, [ToolCall("f", [1, 2])]),
        # thoughts
        ('<think>maybe <tool_call>{"name":"g"}</tool_call></think>\n\nok', "ok", []),
        ('<think>\na\n</think>\n\n<tool_call>\n{"name":"f","arguments":{"x":1}}\n</tool_call>', None, [F1]),
        ('a</think>b<think>c</think><tool_call>{"name":"f","arguments":{"x":1}}</tool_call>', "b", [F1]),
        ('<think>a</think><tool_call>{"name":"g"}</tool_call><think>b</think>\nok', "ok", [G]),
        ('<think>so <tool_call>{"name":"g"}</tool_call>', None, []),
        # Llama
        ('{"name": "f", "parameters": {"x": 1}}', None, [F1]),
        ('{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', None, [F1, G]),
        ('Sure.\n\n{"type": "function", "name": "f", "parameters": {"x": 1}}', "Sure.", [F1]),
        ('```json\n{"name": "f", "arguments": {"x": 1}}\n```', None, [F1]),
        ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}', None, [F1]),
        ('<|python_tag|>brave.call(query="a)b", n=2)', None, [ToolCall("brave", {"query": "a)b", "n": 2})]),
        ("so\n<|python_tag|>x = 1\nprint(x)", "so", [ToolCall("python", {"code": "x = 1\nprint(x)"})]),
        ('<function=f>{"x": 1}</function>', None, [F1]),
        ("[f(x=1), g()]", None, [F1, G]),
        ("[a.f(x=[1, {'b': None}])]", None, [ToolCall("a.f", {"x": [1, {"b": None}]})]),
        # no calls
        (
            'The object {"name": "f", "parameters": {}} is JSON.',
            'The object {"name": "f", "parameters": {}} is JSON.',
            [],
        ),
        ('{"name": "Ann", "type": "person"}', '{"name": "Ann", "type": "person"}', []),
        ("[sin(x)]", "[sin(x)]", []),
        ("[f(x=open('a'))]", "[f(x=open('a'))]", []),
        ("[1, 2]", "[1, 2]", []),
    ],
)
def test_forms(text, content, calls):
    assert parse_tool_calls(text) == (content, calls)
    assert not parse_action(text).errors


@pytest.mark.parametrize(
    ("text", "calls", "reason"),
    [
        ('<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>', [], "Expecting ',' delimiter"),
        ("<tool_call>f(x=1)</tool_call>", [], "Expecting value at character 0"),
        ('<tool_call>{"arguments": {}}</tool_call>', [], 'with a "name"'),
        ("<tool_call>7</tool_call>", [], 'with a "name", found 7'),
        ("<tool_call>", [], "Expecting value"),
        ('<tool_call>{"name": f}</tool_call><tool_call>{"name": "g"}</tool_call>', [G], "Expecting value"),
        ('<tool_call>{"name": "g"}</tool_call>\n<tool_call>{"name": }', [G], "Expecting value"),
        ('{"name": "f", "parameters": {"x": 1}', [], "Expecting ',' delimiter"),
        ("<tool_call>" + "[" * 100_000, [], "nested too deeply"),
        ("<tool_call>" + '{"a":' * 100_000, [], "nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_an_error_and_stays_in_the_content(text, calls, reason):
    parsed = parse_action(text)
    assert list(parsed.calls) == calls
    assert len(parsed.errors) == 1 and reason in parsed.errors[0]
    if not calls:
        assert parsed.content == text
    else:
        assert "<tool_call>" in parsed.content


WORDS = """<tool_call> </tool_call> <think> </think> <|python_tag|> <function=f> </function> {"name": "f" { } [ ]
,"arguments": f(x=1) ' " ``` json 1 \\"""
fragments = st.sampled_from([*WORDS.split(), "\n", " ", "\ud800"])


@given(st.lists(fragments, max_size=30).map("".join))
def test_no_text_makes_the_parser_fail(text):
    parsed = parse_action(text)
    assert all(isinstance(call.name, str) and call.name for call in parsed.calls)


@given(
    st.lists(
        st.tuples(
            st.text(min_size=1).map(lambda name: f"<think>{name}"),
            st.dictionaries(st.text(), st.integers() | st.text()),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_calls_in_the_templates_form_read_back(calls):
    text = "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        for name, arguments in calls
    )
    assert parse_tool_calls(text) == (None, [ToolCall(*call) for call in calls])


@pytest.mark.parametrize("part", ["<tool_call>", '{"name": "f"\n', "<think>", "</think>", "[f(", "<function=f>"])
def test_long_nonsense_takes_no_time(part):
    start_s = time.perf_counter()
    parse_action(part * 5_000)
    assert time.perf_counter() - start_s < 2.0
