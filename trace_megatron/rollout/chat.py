"""Chat templates, rendered incrementally: a history only grows by ids and is never tokenised again.

A template is asked what it writes after an assistant turn: a conversation whose assistant message is a marker is
rendered, and the text behind the marker is the end of the turn, the observation and the opening of the next turn. It
begins with the end-of-turn token, a special token, so tokenising it alone gives the ids it has inside the conversation.

Tools go to the template. One that does not know them (SmolLM2's) finds them described in the system message instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from trace_megatron.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# transformers is imported where it is used: seconds, which ranks that only train need not spend.

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
"""A JSON schema in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""

_MARKER = "TraceActionMarker"
_OPENING: tuple[Message, ...] = ({"role": "user", "content": "Question"},)
_PROBE: Tool = {
    "type": "function",
    "function": {"name": _MARKER, "description": "", "parameters": {"type": "object", "properties": {}}},
}
_TOOLS_TEXT = """You may call functions. Their signatures:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


class ChatRenderer:
    """Renders prompts and observations with a tokenizer's chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        """``eos_token_ids``: more stop tokens, e.g. the generation config's; ``template_options``: the template's own.

        Raises UserError if the template cannot be rendered incrementally.
        """
        self._tokenizer = tokenizer
        self._template_writes_tools = True
        self._template_options = dict(template_options or {})
        if not tokenizer.chat_template:
            raise UserError(
                f"expected a chat template in the tokenizer '{tokenizer.name_or_path}', found none: "
                "use an instruction-tuned model, add chat_template.jinja to its folder, or evaluate it as a base model "
                "with eval.scaffold=react"
            )
        end_of_turn = self._end_of_turn_id()
        eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._template_writes_tools = _MARKER in self._render(_OPENING, True, [_PROBE])
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys((end_of_turn, *eos, *eos_token_ids)))
        """The template's end-of-turn token first, then the tokenizer's and the generation config's eos tokens."""

    @classmethod
    def from_folder(cls, folder: str | Path, template_options: Mapping[str, Any] | None = None) -> ChatRenderer:
        """Tokenizer, chat template and generation config of an HF folder."""
        if not Path(folder).is_dir():
            raise UserError(
                f"expected an HF model folder, found nothing at '{folder}': give the path of a downloaded model"
            )
        return cls(load_tokenizer(folder), eos_token_ids(folder), template_options)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Ids of the opening messages and of the assistant's generation prompt."""
        return self._encode(self._render(messages, add_generation_prompt=True, tools=tools))

    def observation_ids(
        self,
        messages: Sequence[Message],
        action_ids: Sequence[int],
        opening: Sequence[Message] = _OPENING,
        tools: Sequence[Tool] = (),
    ) -> tuple[int, ...]:
        """Ids that follow ``action_ids`` in the history: rest of the turn's end, ``messages``, next generation prompt.

        The sampled stop token stands for the template's end-of-turn token and is not repeated. ``opening``
        and ``tools``: the conversation's first messages and tools, for templates whose turns depend on them (a system
        message that switches thinking off). Raises ValueError if no stop token ended the action: such a turn has no
        continuation.
        """
        if not action_ids or action_ids[-1] not in self.stop_token_ids:
            raise ValueError("an action that no stop token ended has no observation")
        return self._encode(self._text_after_action(messages, opening, tools))[1:]

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Ids of an action's text, for demonstrations: what a policy would have sampled, without the stop token."""
        return self._encode(text)

    def action_text(self, action_ids: Sequence[int]) -> str:
        """The action as text, without the stop token; other special tokens stay, tool calls may need them."""
        stopped = bool(action_ids) and action_ids[-1] in self.stop_token_ids
        ids = list(action_ids[:-1] if stopped else action_ids)
        return self.text(ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """What the ids say, special tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _text_after_action(
        self, messages: Sequence[Message], opening: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> str:
        marker = _MARKER
        while marker in str(opening) or marker in str(tools):
            marker += "X"
        conversation = [*opening, {"role": "assistant", "content": marker}, *messages]
        _, found, text = self._render(conversation, add_generation_prompt=True, tools=tools).partition(marker)
        if not found:
            raise UserError(
                "the chat template does not write an assistant message's content as it is, so histories cannot grow"
            )
        return text

    def _end_of_turn_id(self) -> int:
        """The one token with which the template ends an assistant turn, whatever the turn and what follows it hold."""
        answers = [self._text_after_action([{"role": "user", "content": text}], _OPENING) for text in ("a", "bb")]
        first_ids = [self._encode(answer)[:1] for answer in answers]
        end_of_turn = first_ids[0][0] if first_ids[0] else None
        if end_of_turn is None or first_ids[0] != first_ids[1] or end_of_turn not in self._special_ids():
            raise UserError(
                "expected a chat template that ends an assistant turn with one special token of its tokenizer, "
                f"found {answers[0][:40]!r}: use the chat template that belongs to the tokenizer"
            )
        return end_of_turn

    def _special_ids(self) -> set[int]:
        added = self._tokenizer.added_tokens_decoder
        return {token_id for token_id, token in added.items() if token.special} | set(self._tokenizer.all_special_ids)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Tool] = ()) -> str:
        options = dict(self._template_options)
        if tools and self._template_writes_tools:
            options["tools"] = [dict(tool) for tool in tools]
        elif tools:
            messages = _with_tools(messages, tools)
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
        ) as error:  # whatever a template's code may raise
            roles = ", ".join(str(message.get("role")) for message in messages)
            reason = " ".join(str(error).split())
            raise UserError(f"the chat template refused a conversation of the roles {roles}: {reason}") from error

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of an HF folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def eos_token_ids(folder: str | Path) -> list[int]:
    """End-of-sequence ids of an HF folder's generation config, beside the tokenizer's own."""
    if not (Path(folder) / "generation_config.json").is_file():
        return []
    from transformers import GenerationConfig

    eos = GenerationConfig.from_pretrained(folder).eos_token_id
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def decoder(folder: str | Path) -> Callable[[Sequence[int]], str]:
    """Token ids -> text, special tokens included, by the tokenizer of an HF folder."""
    if not str(folder) or not Path(folder).is_dir():
        raise UserError(f"expected an HF model folder with the run's tokenizer, found nothing at '{folder}'")
    tokenizer = load_tokenizer(folder)
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The messages with the tools in their system message."""
    text = _TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0].get("role") == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
