"""One event a line, with the bound fields run, step, stage and hotkey; never a secret, a signature or a signed query.

A reason is logged when it changes, not each time it is found again (:class:`ReasonLog`).
"""

from __future__ import annotations

import re
import traceback
from collections import OrderedDict
from typing import TYPE_CHECKING, TextIO

from loguru import logger

from subnet.errors import ConfigError

if TYPE_CHECKING:
    from loguru import Logger, Record

LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")
FIELDS = ("run", "step", "stage", "hotkey")
_MAX_FRAMES = 12

_QUERY = re.compile(r"((?:https?|wss?)://[^\s?\"'<>]*\?)[^\s\"'<>]+")
_SIGNED_PATH = re.compile(r"(\?)[^\s\"'<>]*\b(?:sig|signature|X-Amz-Signature)=[^\s\"'<>]*", re.IGNORECASE)
_USERINFO = re.compile(r"((?:https?|wss?|postgres(?:ql)?)://)[^\s/@]+@")
_SIGNATURE = re.compile(r"\b(?:0x)?[0-9a-fA-F]{128}\b")
_ASSIGNED = re.compile(
    r"(?i)\b(secret|password|passwd|token|mnemonic|private_key|authorization|api_key|signature)(['\"]?\s*[=:]\s*)(['\"]?)[^\s,;'\"]+"
)


class Redactor:
    """Replaces what must not be read in a log: query strings of URLs, signatures, named and registered secrets."""

    def __init__(self) -> None:
        self._secrets: set[str] = set()

    def add_secret(self, value: str | bytes) -> None:
        """From now on the value (bytes: also their hex digits) is never written."""
        text = value if isinstance(value, str) else value.hex()
        if len(text) >= 8:
            self._secrets.add(text)

    def clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "[secret]")
        text = _USERINFO.sub(r"\1[user]@", text)
        text = _QUERY.sub(r"\1[query]", text)
        text = _SIGNED_PATH.sub(r"\1[query]", text)
        text = _SIGNATURE.sub("[signature]", text)
        return _ASSIGNED.sub(r"\1\2\3[secret]", text)


REDACTOR = Redactor()


def setup(stream: TextIO, level: str = "INFO", *, run: str = "", hotkey: str = "") -> None:
    """Send our log to ``stream``, replacing what was set up before."""
    if level.upper() not in LEVELS:
        raise ConfigError(f"log level {level!r} is not known", hint=f"one of {', '.join(LEVELS)}")
    bound = {key: value for key, value in (("run", run), ("hotkey", hotkey)) if value}
    logger.remove()
    logger.configure(extra=dict(bound))

    def write(message: str) -> None:
        stream.write(message)
        stream.flush()

    logger.add(write, level=level.upper(), format=_format, colorize=False, backtrace=False, diagnose=False)


def bound(**values: object) -> Logger:
    """The logger with fields (``run``, ``step``, ``stage``, ``hotkey``, ...) on each of its lines."""
    return logger.bind(**values)


def render_line(record: Record) -> str:
    """The whole line of a record, without its end."""
    extra = record["extra"]
    names = [name for name in FIELDS if name in extra] + sorted(name for name in extra if name not in FIELDS)
    parts = [f"{record['time']:YYYY-MM-DD HH:mm:ss.SSS} {record['level'].name:<7}"]
    parts += [f"{name}={extra[name]}" for name in names]
    parts += ["|", record["message"]]
    exception = record["exception"]
    if exception is not None and exception.value is not None:
        parts.append(f"| {_one_line_traceback(exception.value)}")
    return REDACTOR.clean(" ".join(parts)).replace("\r", "").replace("\n", "\\n")


def _format(record: Record) -> str:
    line = render_line(record)
    # loguru formats what we return once more: braces and tags must survive it
    return line.replace("{", "{{").replace("}", "}}").replace("<", r"\<") + "\n"


def _one_line_traceback(error: BaseException) -> str:
    # walked, not extracted: the library would keep the text of every file that an exception went through
    frames = list(traceback.walk_tb(error.__traceback__))[-_MAX_FRAMES:]
    places = " < ".join(
        f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{line} {frame.f_code.co_name}"
        for frame, line in reversed(frames)
    )
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, BaseExceptionGroup):
        text += " [" + "; ".join(_one_line_traceback(inner) for inner in error.exceptions) + "]"
    return f"{text} at {places}" if places else text


class ReasonLog:
    """Logs the reason of a decision about a subject when its code differs from the last one said."""

    def __init__(self, log: Logger | None = None, *, level: str = "INFO", max_subjects: int = 4096) -> None:
        self._log = log if log is not None else logger
        self._level = level
        self._max_subjects = max_subjects
        self._last: OrderedDict[str, str] = OrderedDict()

    def note(self, subject: str, code: str, text: str = "") -> bool:
        """Whether it was said."""
        changed = self._last.get(subject) != code
        self._last[subject] = code
        self._last.move_to_end(subject)
        if len(self._last) > self._max_subjects:
            self._last.popitem(last=False)
        if changed:
            self._log.log(self._level, "{}: {}", subject, f"{code}: {text}" if text else code)
        return changed

    def forget(self, subject: str) -> None:
        self._last.pop(subject, None)
