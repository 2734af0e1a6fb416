"""``docs/errors.md``: every error that the source can make, by where one meets it, with what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import longshore.errors
from scripts.docs.advice import BY_CLASS, BY_FAMILY, INSTRUCTION, RULE, RULE_IS_A_VALUE, SECTIONS, Section
from scripts.docs.config_page import one_line
from scripts.docs.keys_page import sentence
from scripts.docs.messages import Message, messages

INTRODUCTION = """\
# Errors, and what to do

<!-- Generated: python -m scripts.docs -->

An error says the rule, what was found, and what to do. This page has all of them, as the source has them: what is
filled in stands between « and ». Search this page (Ctrl-F) for a few words of yours. Bad arguments are
`ValueError` or `TypeError`, raised before anything is changed; the other classes are these.

"""

AFTER = """
How to go on after an error in the middle of training is told in [the engine](engine.md#errors-and-going-on-after-them);
the short form is: `zero_grad()` on every rank discards the window, and nothing of it was stepped, unless the error is a
`BrokenStateError`.
"""


class UnknownAdviceError(LookupError):
    """A message for which nobody wrote down what to do."""


def page() -> str:
    """The whole page.

    Raises:
        UnknownAdviceError: a message does not say what to do, and no line of ``advice.py`` does.
    """
    parts = [INTRODUCTION + "| class | when | how to go on |", "|---|---|---|"]
    parts += [f"| `{name}` | {_when(name)} | {what} |" for name, what in BY_CLASS.items()]
    parts.append(AFTER)
    found = messages()
    for section in SECTIONS:
        mine = [message for message in found if section_of(message) is section]
        if mine:
            parts += [
                f"## {section.title}\n",
                f"{section.says}\n",
                "| error | what to do |",
                "|---|---|",
                *_rows(mine),
                "",
            ]
    return "\n".join(parts)


def section_of(message: Message) -> Section:
    """The section whose entry says most of where the message is made: its file, words of it, or its room."""
    best: tuple[tuple[bool, bool], Section] | None = None
    for section in SECTIONS:
        for entry in section.files:
            name, _, words = entry.partition(": ")
            here = message.file == name or (name.endswith("/") and message.file.startswith(name))
            rank = (message.file == name, bool(words))
            if here and words in f"{message.kind}: {message.text}" and (best is None or rank > best[0]):
                best = rank, section
    if best is None:
        raise UnknownAdviceError(
            f"{message.file} makes errors and has no section in scripts/docs/advice.py: add it to one"
        )
    return best[1]


def _when(name: str) -> str:
    kind = getattr(longshore.errors, name, None) or getattr(longshore, name)
    return one_line(kind.__doc__.partition("Raised by")[0].partition("Attributes:")[0]).strip()


def _rows(mine: Sequence[Message]) -> Iterable[str]:
    said: set[tuple[str, str]] = set()
    for message in mine:
        if (message.kind, message.text) not in said:
            said.add((message.kind, message.text))
            rule, what = split(message)
            yield f"| `{message.kind}`: {_plain(rule)} | {what} |"


def split(message: Message) -> tuple[str, str]:
    """The message without what it says is to be done, and that, as Markdown; where its own words do not say it,
    those of ``advice.py``.

    Raises:
        UnknownAdviceError: there are none.
    """
    text = " ".join(message.text.split())
    found = INSTRUCTION.search(text)
    if found is not None:
        rule, what = text[: found.start()], found["what"]
        if rule.count("(") > rule.count(")"):
            rule, _, before = rule.rpartition("(")
            what = f"{before}{text[found.start() : found.start('what')]}{what}"
        what = what if what.count("(") >= what.count(")") else what.removesuffix(")")
        what = f"run {what}" if what.startswith("pip ") else what.strip()
        return rule.rstrip(" ;:,.("), sentence(_plain(what))
    for pattern, what in BY_FAMILY:
        if re.search(pattern, f"{message.kind}: {text}"):
            return text, what
    rule = RULE.search(text)
    if rule is not None:
        like = "" if RULE_IS_A_VALUE.match(rule["rule"]) else "a value that is "
        return text, sentence(_plain(f"Give {like}{rule['rule']}"))
    what = section_of(message).otherwise
    if not what:
        raise UnknownAdviceError(
            f"{message.file}:{message.line}: {message.kind}: {text!r} does not say what to do; let it say so "
            "('...; use x'), or add a line to BY_FAMILY in scripts/docs/advice.py"
        )
    return text, what


def _plain(text: str) -> str:
    """As Markdown: nothing in a message is markup."""
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", text)
