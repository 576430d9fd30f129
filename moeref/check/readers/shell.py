"""Reads a shell script without running it: variables, arrays, sourced files, and the words of its commands.

What a script computes (substituted commands, what it sets under a condition or in a loop) is not known, and neither is
the environment. Such text stays as it is written.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from moeref.check.files import text_of
from moeref.check.readers.literal import LiteralError, literal
from moeref.check.report import CheckError

_CLOSING = {"$(": ")", "${": "}"}
_OPENING, _CLOSERS = frozenset({"if", "for", "while", "until", "case"}), frozenset({"fi", "done", "esac"})
_BEFORE_A_COMMAND = frozenset({"then", "else", "elif", "do", "!", "time", "{", "}"})
_DECLARING = frozenset({"export", "local", "declare", "readonly"})
#: The inside of `${…}`: a name, whether all elements of an array are meant, and a default, with `:` for nothing too.
_PARAMETER = re.compile(r"([A-Za-z_]\w*)(\[[@*]\])?(?:(:?)-(.*))?", re.DOTALL)
#: An override of a value in a tree, as Hydra takes it.
_OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_][\w.@/-]*=.*|~[\w.]+", re.DOTALL)
#: What the script itself is given: nothing here.
_OF_THE_SCRIPT = frozenset({"$@", "$*", "${@}", "${*}"})
#: All of an array. Of one that no line of a program sets it is no word: arrays do not come from the environment.
_ALL = re.compile(r"\"?\$\{([A-Za-z_]\w*)\[@\]\}\"?")
_SETS_UNSEEN = re.compile(r"\b(?:eval|mapfile|readarray|read|declare|local)\b")
#: Where a variable comes from that the caller gives.
GIVEN = "command line"
#: Files that source one another, and words of a script: the most that are read.
DEEPEST, MOST_WORDS = 8, 20_000
#: The most characters of a variable: each may double the one before.
LONGEST = 30_000


@dataclass(frozen=True)
class Word:
    """A word after expansion. `known` is false if a part of it is text that only a shell could compute.

    So it is if the whole word is there `perhaps`, under a condition.
    """

    text: str
    where: str
    known: bool = True
    perhaps: bool = False


@dataclass
class Script:
    """What scripts assign and call. `given` are variables whose values replace those of the scripts."""

    given: Mapping[str, str] = field(default_factory=dict)
    commands: list[list[Word]] = field(default_factory=list)
    variables: dict[str, list[Word]] = field(default_factory=dict)
    missing: list[Word] = field(default_factory=list)  # sourced files that are not there
    arrays: list[str] = field(default_factory=list)
    _conditions: int = 0
    _guarded: bool = False
    _words: int = 0
    _text: str = ""  # of all files, without comments
    _executed: bool = False  # a file that is run, and not sourced by one that might set something

    def __post_init__(self) -> None:
        self.variables |= {name: [Word(value, GIVEN)] for name, value in self.given.items()}

    def read(self, path: Path, depth: int = 0) -> None:
        """Read one file. Raises CheckError for a file that cannot be read."""
        if depth > DEEPEST:
            raise CheckError(f"{path}: files source one another more than {DEEPEST} times")
        text = text_of(path)
        self._executed = self._executed or (depth == 0 and text.startswith("#!"))
        self._text += re.sub(r"(?m)(^|\s)#.*$", "", text)
        for raws, guarded in _statements(text, path.name):
            self._words += len(raws)
            if self._words > MOST_WORDS:
                raise CheckError(f"{path}: a script has at most {MOST_WORDS} words")
            self._guarded = guarded
            self._statement(raws, path, depth)

    def _statement(self, raws: list[Word], path: Path, depth: int) -> None:
        raws = self._after_keywords(raws)
        while raws and raws[0].text in _DECLARING:
            raws = raws[1:]
        texts = [raw.text for raw in raws]
        if raws and all(re.match(r"[A-Za-z_]\w*\+?=", text) for text in texts):
            for raw in raws:
                self._assign(raw)
        elif len(raws) > 1 and texts[0] in ("source", "."):
            self._source(raws[1], path, depth)
        elif len(raws) > 2 and texts[:2] == ["printf", "-v"]:
            self._set(texts[2], [Word(f"${{{texts[2]}}}", raws[0].where, known=False)])
        elif raws:
            self.commands.append([word for raw in raws for word in self.expand(raw.text, raw.where)])

    def _after_keywords(self, raws: list[Word]) -> list[Word]:
        """The words after `then`, `do` and the like; none of a condition or of the head of a loop."""
        while raws:
            if raws[0].text in _OPENING:
                self._conditions += 1
                return []
            if raws[0].text in _CLOSERS:
                self._conditions = max(0, self._conditions - 1)
                return []
            if raws[0].text.startswith("(("):
                return []
            if raws[0].text not in _BEFORE_A_COMMAND:
                return raws
            raws = raws[1:]
        return raws

    def _assign(self, raw: Word) -> None:
        name, _, value = raw.text.partition("=")
        adds, name = name.endswith("+"), name.rstrip("+")
        if value.startswith("("):
            self.arrays += [] if name in self.arrays else [name]
            file, _, line = raw.where.rpartition(":")
            elements = _statements(value[1:-1], file, int(line), commands=False)
            words = [word for each, _ in elements for one in each for word in self.expand(one.text, one.where)]
        else:
            words = [_joined(self.expand(value, raw.where, quoted=True), raw.where)]
        before = self.variables.get(name, [])
        if self._conditions or self._guarded:
            grows = value.startswith("(") and (adds or not before)
            if value.startswith("(") and _overrides([*before, *words]):
                # Each of them may be there: a value that any of them gives is not known.
                before = before if adds else [replace(word, known=False, perhaps=True) for word in before]
                adds, words = True, [replace(word, known=False, perhaps=True) for word in words]
            else:
                words = self._perhaps(name, words, raw.where, grows=grows, array=value.startswith("("))
        self._set(name, [*(before if adds else []), *words])

    @staticmethod
    def _perhaps(name: str, words: list[Word], where: str, *, grows: bool, array: bool) -> list[Word]:
        """What a variable is under a condition. Arguments that an array grows by stay, and are not known."""
        if grows and words and words[0].text.startswith("-"):
            return [replace(word, known=False, perhaps=True) for word in words]
        return [Word(f"${{{name}[@]}}" if array else f"${{{name}}}", where, known=False)]

    def _set(self, name: str, words: list[Word]) -> None:
        if sum(len(word.text) + 1 for word in words) > LONGEST:
            raise CheckError(f"{words[-1].where}: {name} has more than {LONGEST} characters")
        if name not in self.given:
            self.variables[name] = words

    def _source(self, raw: Word, path: Path, depth: int) -> None:
        text = _joined(self.expand(raw.text, raw.where), raw.where).text
        # A folder that only the shell can compute is nearly always the script's own.
        tail = text if "$" not in text else re.split(r"[)}\"]|\$\w+", text)[-1].lstrip("/")
        for found in (path.parent / tail, Path(tail)):
            if tail and os.path.isfile(found):  # noqa: PTH113 -- it may be no name of a file, where Path raises
                return self.read(found, depth + 1)
        if not (self._conditions or self._guarded):
            self.missing.append(Word(tail or text, raw.where))
        return None

    def expand(self, raw: str, where: str, *, quoted: bool = False) -> list[Word]:
        """The words that `raw` stands for. If `quoted`, white space in values does not separate words."""
        fields = _Fields(where)
        if raw.strip('"') in _OF_THE_SCRIPT or self._never_set(raw):
            return []
        self._expand(raw, fields, split=not quoted)
        return fields.words

    def _never_set(self, raw: str) -> bool:
        """Whether a word is all of an array that nothing sets: no line names it but to expand it."""
        array = _ALL.fullmatch(raw)
        if array is None or array[1] in self.variables or not self._executed or self.missing:
            return False
        if _SETS_UNSEEN.search(self._text):
            return False
        return not re.search(rf"(?<!\{{)\b{array[1]}\b", self._text)

    def _expand(self, raw: str, fields: _Fields, *, split: bool) -> None:
        at = 0
        while at < len(raw):
            end = _end(raw, at)
            piece, at = raw[at:end], end
            if piece[0] == "'" and len(piece) > 1:
                fields.add(piece[1:-1])
            elif piece[0] == '"' and len(piece) > 1:
                fields.add("")
                self._expand(piece[1:-1], fields, split=False)
            elif piece[0] == "\\":
                fields.add("" if piece[1:] == "\n" else piece[1:])
            elif piece[0] in "$`" and len(piece) > 1:
                self._value(piece, fields, split=split)
            else:
                fields.add(piece)

    def _value(self, piece: str, fields: _Fields, *, split: bool) -> None:
        if piece.startswith("$(("):
            inside = _joined(self.expand(re.sub(r"(?<![\w$}])([A-Za-z_]\w*)", r"$\1", piece[3:-2]), ""), "")
            try:
                return fields.add(str(literal(inside.text)))
            except LiteralError:
                return fields.add(piece, known=False)
        name = _PARAMETER.fullmatch(piece[2:-1] if piece.startswith("${") else piece[1:])
        words = self.variables.get(name[1]) if name else None
        if name and name[3] and words and all(word.known and not word.text for word in words):
            words = None  # `:-` is for what is empty too
        if words is None:
            if name and name[4] is not None:
                return self._expand(name[4], fields, split=split)
            return fields.add(piece, known=False)
        return fields.put(words if name and name[2] else words[:1], split=split, apart=bool(name and name[2]))


@dataclass
class _Fields:
    """Words while they are put together."""

    where: str
    words: list[Word] = field(default_factory=list)
    _open: bool = False

    def add(self, text: str, *, known: bool = True, where: str = "") -> None:
        if self._open:
            last = self.words[-1]
            self.words[-1] = replace(last, text=last.text + text, known=last.known and known)
        else:
            self.words.append(Word(text, where or self.where, known))
            self._open = True

    def put(self, values: list[Word], *, split: bool, apart: bool) -> None:
        """Values of a variable: joined to the open word, and separate after the first if there are several."""
        found = [each for value in values for each in (_separated(value) if split else [value])]
        for number, value in enumerate(found):
            if number and (apart or split):
                self._open = False
            self.add(value.text, known=value.known, where=value.where if apart or value.where == GIVEN else "")


def _overrides(words: list[Word]) -> bool:
    """Whether there are words, and all are overrides."""
    return bool(words) and all(_OVERRIDE.fullmatch(word.text) for word in words)


def _joined(words: list[Word], where: str) -> Word:
    return Word(" ".join(word.text for word in words), where, all(word.known for word in words))


def _separated(value: Word) -> Iterator[Word]:
    """The words of a value that white space separates, but not inside of what only a shell could compute."""
    at = start = 0
    text = f"{value.text} "
    while at < len(text):
        if text[at].isspace():
            if word := text[start:at]:
                known = value.known or not (value.perhaps or "$" in word or "`" in word)
                yield replace(value, text=word, known=known)
            start = at = at + 1
        else:
            at = _end(text, at) if text[at] in "$`" else at + 1


def _end(text: str, at: int) -> int:
    """Where the piece that begins at `at` ends: a quotation, an expansion, an escape or one character."""
    first, two = text[at], text[at : at + 2]
    if first == "\\":
        return min(at + 2, len(text))
    if first == "'":
        return _until(text, "'", at + 1)
    if first in '"`':
        return _nested(text, at + 1, first)
    if two in ("$(", "${"):
        return _nested(text, at + 2, _CLOSING[two])
    if first == "$" and (name := re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!]").match(text, at + 1)):
        return name.end()
    return at + 1


def _until(text: str, closing: str, at: int) -> int:
    found = text.find(closing, at)
    return len(text) if found < 0 else found + 1


def _nested(text: str, at: int, closing: str) -> int:
    opening = {")": "(", "}": "{"}.get(closing)
    depth = 1
    while at < len(text):
        if text[at] == closing:
            depth -= 1
            at += 1
            if not depth:
                return at
        elif text[at] == opening:
            depth += 1
            at += 1
        elif closing == '"' and text[at] == "'":
            at += 1
        elif closing == ")" and (comment := _COMMENT.match(text, at)) and text[at - 1].isspace():
            at = comment.end()
        else:
            at = _end(text, at)
    return at


def _statements(text: str, file: str, line: int = 1, *, commands: bool = True) -> Iterator[tuple[list[Word], bool]]:
    """(words, whether they stand after `&&` or `||`) of every command; of an array, of every line; not expanded."""
    words: list[Word] = []
    at = 0
    guarded, after = False, False
    while at < len(text):
        end, kind = _token(text, at, commands=commands)
        if kind == "word":
            guarded = guarded if words else after
            words.append(Word(text[at:end], f"{file}:{line}"))
        elif kind == "end":
            if words:
                yield words, guarded
                words = []
            after = text[at:end] in ("&&", "||")
        line += text.count("\n", at, end)
        at = end
    if words:
        yield words, guarded


_SPACE = re.compile(r"(?:[ \t\r]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_REDIRECTION = re.compile(r"(?:[0-9]*|&)[<>]{1,2}&?[ \t]*[^\s;|&<>]*")
_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1[^\n]*")
_END = re.compile(r"&&|\|\||[\n;|&()]")


def _token(text: str, at: int, *, commands: bool) -> tuple[int, str]:
    """(end, kind) of the token at `at`: `space`, `word`, or `end` of a command."""
    if found := _SPACE.match(text, at) or _COMMENT.match(text, at):
        return found.end(), "space"
    if commands and (found := _HEREDOC.match(text, at)):
        last = re.compile(rf"^[ \t]*{found[2]}$", re.MULTILINE).search(text, found.end())
        return last.end() if last else len(text), "space"
    if commands and (found := _REDIRECTION.match(text, at)):
        return found.end(), "space"
    if commands and text.startswith("((", at):
        return _nested(text, at + 2, ")"), "word"
    if found := _END.match(text, at):
        return found.end(), "end"
    end = at
    while end < len(text) and not text[end].isspace() and not _END.match(text, end):
        end = _end(text, end)
        if text[end - 1] == "=" and text.startswith("(", end) and re.fullmatch(r"\w+\+?=", text[at:end]):
            end = _nested(text, end + 1, ")")
    return end, "word"
