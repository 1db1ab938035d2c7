"""Dialogues to rows of tokens: each token with whether it is learnt and whether a dialogue starts there; the same each time.

Dialogues longer than a row are cut at its end. Several share a row where they fit, in the order in which they come; what is
left of a row is filled with the end-of-text token, as a text of its own that isn't learnt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from iota.chat import Answered, ChatTemplate, Line, check_line, load_template
from iota.corpus import Split, read_lines
from iota.tokenizer import RunTokenizer
from subnet.errors import ConfigError
from subnet.model.token_bits import LEARNT, STARTS

OPEN_ROWS = 16
"""Rows that wait for dialogues that fit; the fullest goes when one more is needed. Changing it changes the rows."""

Tokens = NDArray[np.uint32]


class DialogueCounts(msgspec.Struct):
    """What became of the dialogues."""

    dialogues: int = 0
    cut: int = 0
    """Longer than a row: their ends are missing."""
    dropped: int = 0
    """No answer begins within a row."""
    rows: int = 0
    learnt_tokens: int = 0

    def words(self) -> str:
        """One line."""
        return (
            f"{self.dialogues:,} dialogues in {self.rows:,} rows, {self.learnt_tokens:,} tokens of answers; "
            f"{self.cut:,} cut at a row's end, {self.dropped:,} left out (no answer within a row)"
        )


class DialogueReader:
    """Lines of JSONL files as tokens with their bits."""

    def __init__(self, tokenizer: RunTokenizer, source: Path | None) -> None:
        """``source``: where the tokenizer was read from, which is where its chat template is looked for."""
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None if source is None else load_template(source)
        self._decoder = msgspec.json.Decoder(Line)

    def read(self, file: Path) -> Iterator[Tokens]:
        """One dialogue after the other; a line that is none raises :class:`ConfigError` with its place."""
        for number, data in read_lines(file):
            where = f"{file} line {number}"
            try:
                line = self._decoder.decode(data)
                check_line(line)
                yield self._tokens(line)
            except (msgspec.MsgspecError, ValueError) as error:
                hint = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]} or {"prompt", "answer"}'
                raise ConfigError(f"{where} is no dialogue: {error}", hint=f"a line is {hint}") from error

    def _tokens(self, line: Line) -> Tokens:
        if not line.messages:
            answer = line.answer if line.answer is not None else line.completion
            asked, answered = self._tokenizer.encode([line.prompt or "", answer or ""])
            learnt = np.append(answered, np.uint32(self._tokenizer.end_of_text)) | np.uint32(LEARNT)
            return _started(np.concatenate([asked, learnt]))
        if self._template is None:
            raise ConfigError(
                "the tokenizer has no chat template",
                hint="use the tokenizer of an instruction-tuned model, put a chat_template.jinja beside tokenizer.json, "
                'or write lines of "prompt" and "answer"',
            )
        return _started(self._marked(self._rendered(self._template, line)))

    def _rendered(self, template: ChatTemplate, line: Line) -> Answered:
        from jinja2 import TemplateError

        try:
            return template.answered(line.messages)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses it: {error}") from error

    def _marked(self, dialogue: Answered) -> Tokens:
        ids, starts = self._tokenizer.encode_marked(dialogue.text)
        learnt = np.zeros(len(ids), dtype=bool)
        for first, end in dialogue.answers:
            learnt |= (starts >= first) & (starts < end)
        return ids | np.where(learnt, np.uint32(LEARNT), np.uint32(0))


def _started(tokens: Tokens) -> Tokens:
    """The first token starts a dialogue, and nothing predicts it."""
    tokens[0] = (tokens[0] & ~np.uint32(LEARNT)) | np.uint32(STARTS)
    return tokens


class RowPacker:
    """Dialogues into rows of ``length`` tokens; :meth:`add` and :meth:`finish` give the rows that are full."""

    def __init__(self, length: int, end_of_text: int, counts: DialogueCounts, *, packing: bool) -> None:
        self._length, self._end, self._counts, self._packing = length, end_of_text, counts, packing
        self._open: list[tuple[int, list[Tokens]]] = []

    def add(self, dialogue: Tokens) -> Iterator[Tokens]:
        """Rows that are done with, now that there is one more dialogue."""
        self._counts.dialogues += 1
        if len(dialogue) > self._length:
            dialogue = dialogue[: self._length]
            self._counts.cut += 1
        if not (dialogue & np.uint32(LEARNT)).any():
            self._counts.dropped += 1
            return
        for index, (used, parts) in enumerate(self._open):
            if used + len(dialogue) <= self._length:
                self._open[index] = used + len(dialogue), [*parts, dialogue]
                break
        else:
            self._open.append((len(dialogue), [dialogue]))
        if not self._packing or len(self._open) > OPEN_ROWS:
            fullest = max(range(len(self._open)), key=lambda i: (self._open[i][0], -i))
            yield self._row(self._open.pop(fullest)[1])

    def finish(self) -> Iterator[Tokens]:
        """The rows that are left."""
        while self._open:
            yield self._row(self._open.pop(0)[1])

    def _row(self, parts: Sequence[Tokens]) -> Tokens:
        row = np.concatenate(parts)
        fill = np.full(self._length - len(row), self._end, dtype=np.uint32)
        fill[:1] |= np.uint32(STARTS)
        row = np.concatenate([row, fill])
        self._counts.rows += 1
        self._counts.learnt_tokens += int((row & np.uint32(LEARNT) != 0).sum())
        return row


def survey_dialogues(files: Sequence[Path]) -> tuple[str, int, int]:
    """Hash of all lines, their number and their bytes."""
    digest, count, size_bytes = blake3(b"iota/dialogues/1\0"), 0, 0
    for file in files:
        for _, line in read_lines(file):
            digest.update(len(line).to_bytes(8, "little") + line)
            count, size_bytes = count + 1, size_bytes + len(line)
    return digest.hexdigest(), count, size_bytes


def split_of(count: int, fraction: float) -> Split:
    """Which dialogues are held out: whole ones, evenly spaced; at least one where any are wanted."""
    if fraction and int(count * fraction) == 0:
        raise ConfigError(
            f"of {count} dialogues a share of {fraction} is none",
            hint=f"set data.holdout_fraction to {1 / max(count, 2):.3g} or more, or to 0",
        )
    return Split(fraction=fraction, whole_documents=True)
