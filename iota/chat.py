"""Lines of dialogues to text and to what of it is answered, by the tokenizer's own chat template.

A line is ``{"messages": [{"role": ..., "content": ...}, ...]}``, or ``{"prompt": ..., "answer": ...}`` (``completion`` will
do) without any template. What the template writes for an assistant's turn, its end mark included, is the answer.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from subnet.errors import ConfigError

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
ASSISTANT = "assistant"


class Message(msgspec.Struct, frozen=True):
    """One turn."""

    role: str
    content: str


class Line(msgspec.Struct, frozen=True):
    """A line of a JSONL file, in either form."""

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    answer: str | None = None
    completion: str | None = None


class Answered(msgspec.Struct, frozen=True):
    """A rendered dialogue and the character ranges of its answers."""

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A tokenizer's template with its special tokens."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._source, self._special = source, dict(special)

    @property
    def described(self) -> str:
        """All that rendering depends on, beside the library."""
        return json.dumps([self._source, self._special], sort_keys=True)

    def render(self, messages: tuple[Message, ...], *, asks: bool = False) -> str:
        """The dialogue as text; ``asks``: with the beginning of the assistant's turn that is to come."""
        library: Any = importlib.import_module("transformers.utils.chat_template_utils")
        plain = [{"role": m.role, "content": m.content} for m in messages]
        rendered, _ = library.render_jinja_template(
            [plain], chat_template=self._source, add_generation_prompt=asks, **self._special
        )
        return str(rendered[0])

    def answered(self, messages: tuple[Message, ...]) -> Answered:
        """Raises ValueError where there is no answer, or the template writes earlier turns anew for later ones."""
        whole = self.render(messages)
        answers: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message.role != ASSISTANT:
                continue
            before, through = self.render(messages[:index], asks=True), self.render(messages[: index + 1])
            if not through.startswith(before) or not whole.startswith(through):
                raise ValueError("the chat template writes earlier turns anew: end the line with its first answer")
            answers.append((len(before), len(through)))
        if not answers:
            raise ValueError(f"no message has the role {ASSISTANT}")
        return Answered(whole, tuple(answers))


def load_template(tokenizer: Path) -> ChatTemplate | None:
    """The template beside a ``tokenizer.json`` (or in its directory), or None."""
    directory = tokenizer if tokenizer.is_dir() else tokenizer.parent
    described: dict[str, Any] = {}
    if (directory / CONFIG_FILE).is_file():
        try:
            described = cast("dict[str, Any]", json.loads((directory / CONFIG_FILE).read_bytes()))
        except ValueError as error:
            raise ConfigError(f"{directory / CONFIG_FILE} is not JSON: {error}", hint="copy the file again") from error
    special: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value: Any = described.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            special[name] = value
    source: Any = described.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {str(one["name"]): str(one["template"]) for one in cast("list[dict[str, Any]]", source)}
        source = named.get("default")
    if (directory / TEMPLATE_FILE).is_file():
        source = (directory / TEMPLATE_FILE).read_text()
    return ChatTemplate(source, special) if isinstance(source, str) and source else None


def check_line(line: Line) -> None:
    """Raises ValueError unless the line is of one of the two forms, and whole."""
    answer = line.answer if line.answer is not None else line.completion
    if bool(line.messages) == (line.prompt is not None):
        raise ValueError('give either "messages" or "prompt" and "answer"')
    if not line.messages and not answer:
        raise ValueError('"answer" is missing or empty')
