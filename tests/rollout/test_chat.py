"""What the renderer appends equals what the template writes, id for id."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import build_tokenizer
from transformers import AutoTokenizer

from trace_megatron.errors import UserError
from trace_megatron.rollout.chat import ChatRenderer

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

APPENDING = [
    "SmolLM2",
    "HuggingFaceTB-SmolLM3-3B",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "Qwen3-updated_from_bfcl_eval",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
]
"""Templates that leave earlier turns as they were."""
REWRITING = ["Qwen-QwQ-32B", "Qwen3.5-4B"]
"""Templates that take thoughts out of earlier turns: only what follows the last turn can be compared."""
WITHOUT_TOOL_ROLE = ["SmolLM2", "meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"]
"""SmolLM2 has none; Llama writes a tool's answer as JSON, with nothing else to tell it apart: as good as a user's."""


@pytest.fixture(scope="session")
def qwen_tokenizer(trace_data: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tokenizer")
    source = trace_data / "models" / "tokenizer"
    (folder / "tokenizer.json").write_bytes(gzip.decompress((source / "qwen3_tokenizer.json.gz").read_bytes()))
    (folder / "tokenizer_config.json").write_text((source / "tokenizer_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": LLAMA_TOKENS}, replace_extra_special_tokens=False)
    return tokenizer


def load_renderer(tokenizer, trace_data: Path, name: str) -> ChatRenderer:
    path = trace_data / "models" / "chat_templates" / f"{name}.jinja"
    tokenizer.chat_template = SMOLLM2 if name == "SmolLM2" else path.read_text()
    return ChatRenderer(tokenizer, template_options={"tools": []} if "Hermes" in name else None)


def render(tokenizer, messages, name: str, tools=()) -> str:
    options = {"tools": list(tools)} if tools or "Hermes" in name else {}
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


# No surrounding blanks, which some templates strip from messages, and no thoughts.
texts = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), min_size=1, max_size=30).filter(
    lambda text: text == text.strip() and "/no_think" not in text and "/think" not in text
)
relaxed = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", APPENDING)
def test_growing_history_equals_the_whole_conversation(name, qwen_tokenizer, trace_data):
    renderer = load_renderer(qwen_tokenizer, trace_data, name)
    roles = ["user"] if name in WITHOUT_TOOL_ROLE or "Hermes" in name else ["user", "tool"]

    @relaxed
    @given(st.booleans(), texts, st.lists(st.tuples(texts, texts, st.sampled_from(roles)), min_size=1, max_size=3))
    def check(with_system, question, rounds):
        system = [{"role": "system", "content": "Be brief."}] if with_system else []
        opening = [*system, {"role": "user", "content": question}]
        history, messages = renderer.prompt_ids(opening), list(opening)
        for answer, content, role in rounds:
            action = (*qwen_tokenizer.encode(answer), renderer.stop_token_ids[0])
            observation = [{"role": role, "content": content}]
            history += action + renderer.observation_ids(observation, action, opening)
            messages += [{"role": "assistant", "content": answer}, *observation]
        assert history == tuple(qwen_tokenizer.encode(render(qwen_tokenizer, messages, name)))

    check()


@pytest.mark.parametrize("name", REWRITING)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_rewriting_templates_append_what_they_write_after_the_turn(name, role, qwen_tokenizer, trace_data):
    renderer = load_renderer(qwen_tokenizer, trace_data, name)

    @relaxed
    @given(texts, texts, texts)
    def check(question, answer, content):
        opening = [{"role": "user", "content": question}]
        action = (*qwen_tokenizer.encode(f"so\n</think>\n\n{answer}"), renderer.stop_token_ids[0])
        observation = [{"role": role, "content": content}]
        ids = renderer.observation_ids(observation, action, opening)
        whole = [*opening, {"role": "assistant", "content": answer}, *observation]
        expected = tuple(qwen_tokenizer.encode(render(qwen_tokenizer, whole, name)))
        assert expected[-len(ids) :] == ids
        assert expected[-len(ids) - 1] == renderer.stop_token_ids[0]

    check()


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name} & more <br>.",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    }
    for name in ("double", "halve")
]
CALLING = [
    "Qwen-Qwen3-0.6B",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen3-updated_from_bfcl_eval",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
]
"""Templates that write tools."""


@pytest.mark.parametrize("name", CALLING)
def test_histories_with_tools_equal_the_whole_conversation(name, qwen_tokenizer, trace_data):
    """The assistant's calls are told to the template as such: what it writes is what the policy sampled."""
    renderer = load_renderer(qwen_tokenizer, trace_data, name)
    calls_form = '{{"name": "{name}", "parameters": {{"x": {x}}}}}' if "llama" in name else None
    calls_form = calls_form or '<tool_call>\n{{"name": "{name}", "arguments": {{"x": {x}}}}}\n</tool_call>'

    @relaxed
    @given(st.booleans(), texts, st.lists(st.tuples(st.integers(0, 99), texts), min_size=1, max_size=4))
    def check(with_system, question, rounds):
        system = [{"role": "system", "content": "Be brief."}] if with_system else []
        opening = [*system, {"role": "user", "content": question}]
        history, messages = renderer.prompt_ids(opening, TOOLS), list(opening)
        for x, result in rounds:
            text = calls_form.format(name="double", x=x)
            action = (*qwen_tokenizer.encode(text), renderer.stop_token_ids[0])
            observation = [{"role": "tool", "content": result}]
            history += action + renderer.observation_ids(observation, action, opening, TOOLS)
            call = {"type": "function", "function": {"name": "double", "arguments": {"x": x}}}
            messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, *observation]
        assert history == tuple(qwen_tokenizer.encode(render(qwen_tokenizer, messages, name, TOOLS)))

    check()


def test_thoughts_stay_as_they_were_sampled(qwen_tokenizer, trace_data):
    """Qwen3's template takes the thoughts out of earlier turns; the history that the policy saw keeps them."""
    renderer = load_renderer(qwen_tokenizer, trace_data, "Qwen-Qwen3-0.6B")
    opening = [{"role": "user", "content": "q"}]
    thought = "<think>\nfirst  try</think>\n\n\n12"
    action = (*qwen_tokenizer.encode(thought), renderer.stop_token_ids[0])
    observation = [{"role": "user", "content": "no"}]
    history = renderer.prompt_ids(opening) + action + renderer.observation_ids(observation, action, opening)
    assert f"<|im_start|>assistant\n{thought}<|im_end|>\n<|im_start|>user\nno<|im_end|>" in qwen_tokenizer.decode(
        history
    )
    said = [*opening, {"role": "assistant", "content": thought}, *observation]
    assert "first" not in render(qwen_tokenizer, said, "Qwen-Qwen3-0.6B")  # or the test shows nothing


@pytest.mark.parametrize("with_system", [False, True])
def test_a_template_without_tools_finds_them_in_the_system_message(with_system, qwen_tokenizer, trace_data):
    renderer = load_renderer(qwen_tokenizer, trace_data, "SmolLM2")
    opening = [{"role": "system", "content": "Be brief."}] * with_system + [{"role": "user", "content": "q"}]
    text = qwen_tokenizer.decode(renderer.prompt_ids(opening, TOOLS))
    system, _, rest = text.partition("<|im_end|>")
    assert system.startswith(
        "<|im_start|>system\nBe brief.\n\nYou may" if with_system else "<|im_start|>system\nYou may"
    )
    assert [json.loads(line) for line in system.splitlines() if line.startswith('{"type"')] == TOOLS
    assert rest == "\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    action = (*qwen_tokenizer.encode("a"), renderer.stop_token_ids[0])
    observed = renderer.observation_ids([{"role": "tool", "content": "4"}], action, opening, TOOLS)
    assert qwen_tokenizer.decode(observed) == "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"


def test_several_tool_answers_share_one_turn(qwen_tokenizer, trace_data):
    renderer = load_renderer(qwen_tokenizer, trace_data, "Qwen-Qwen3-0.6B")
    action = (*qwen_tokenizer.encode("call"), renderer.stop_token_ids[0])
    ids = renderer.observation_ids([{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}], action)
    assert qwen_tokenizer.decode(ids) == (
        "\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_opening_decides_how_the_next_turn_begins(qwen_tokenizer, trace_data):
    renderer = load_renderer(qwen_tokenizer, trace_data, "HuggingFaceTB-SmolLM3-3B")
    opening = [{"role": "system", "content": "/no_think"}, {"role": "user", "content": "q"}]
    action = (*qwen_tokenizer.encode("a"), renderer.stop_token_ids[0])
    ids = renderer.observation_ids([{"role": "user", "content": "b"}], action, opening)
    assert qwen_tokenizer.decode(ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n")


def test_a_template_of_another_tokenizer_is_refused(trace_data):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        trace_data / "models" / "chat_templates" / "meta-llama-Llama-3.2-3B-Instruct.jinja"
    ).read_text()
    with pytest.raises(UserError, match=r"eot_id.*belongs to the tokenizer"):
        ChatRenderer(tokenizer)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "expected a chat template"),
        ("{{ raise_exception('only one question') }}", "roles user, assistant, user: only one question"),
        ("{% for m in messages %}{{ m.content|upper }}<|im_end|>{% endfor %}", "content as it is"),
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "one special token"),
        ("{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}", "one special token"),
    ],
)
def test_templates_that_cannot_grow_are_refused(template, message):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message):
        ChatRenderer(tokenizer)


def test_any_stop_token_stands_for_the_end_of_the_turn():
    tokenizer = build_tokenizer()
    renderer = ChatRenderer(tokenizer, eos_token_ids=[256])
    assert renderer.stop_token_ids == (258, 256)
    message = [{"role": "user", "content": "no"}]
    by_end_of_turn, by_eos = (renderer.observation_ids(message, (65, stop)) for stop in renderer.stop_token_ids)
    assert tokenizer.decode(by_end_of_turn) == "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
    assert by_eos == by_end_of_turn
    for unfinished in [(), (65,), (258, 65)]:
        with pytest.raises(ValueError, match="no stop token"):
            renderer.observation_ids(message, unfinished)


def test_action_text_leaves_out_the_stop_token_alone():
    tokenizer = build_tokenizer()
    renderer = ChatRenderer(tokenizer)
    hi = tokenizer.encode("Hi")
    assert renderer.action_text((*hi, 258)) == renderer.action_text(hi) == "Hi"
    assert renderer.action_text((257, *hi, 258, 258)) == "<|im_start|>Hi<|im_end|>"


def test_stop_tokens_of_a_folder_come_from_tokenizer_and_generation_config(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    assert ChatRenderer.from_folder(tmp_path).stop_token_ids == (258,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256]}))
    assert ChatRenderer.from_folder(tmp_path).stop_token_ids == (258, 256)
    with pytest.raises(UserError, match="HF model folder"):
        ChatRenderer.from_folder(tmp_path / "missing")
