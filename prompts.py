"""Many prompts from a file, many answers to a file, and a run that may be killed at any moment and resumed.

    with Results("answers.jsonl", resume=True) as results:
        for line in read_prompts("prompts.jsonl"):
            if not results.done(line):
                results.write({**head(line), "text": ..., "finish_reason": "stop"})

The one idea: what has been done is written nowhere but in the answers themselves. Every record begins with the id of
its line and a fingerprint of what was asked, and goes to the end of the file as one whole line. So a kill can only cut
the last line short; a resumed run drops that piece, reads what is there, and does the rest. A prompt that has changed
since has another fingerprint, so nobody takes its old answer for the new one.

In: plain text, one prompt a line, or JSONL, one object a line: a prompt under one of three keys, and what else it wants

    {"prompt": "Why is the sky blue?", "id": "sky", "max_tokens": 100, "temperature": 0.7, "at": 1.5}
    {"messages": [{"role": "user", "content": "Why?"}], "stop": ["\\n"], "n": 2, "seed": 1}
    {"prompt_ids": [1, 17, 4], "logit_bias": {"17": -5}}
    {"prompt": "Name a cat, as JSON.", "json_schema": {"type": "object", "properties": {"name": {"type": "string"}}}}

A file is JSONL as a whole or not at all: if its name ends in .jsonl, or if its first line that is not empty is a JSON
object. `at` is when the request arrives, in seconds from the beginning. A line that cannot be used becomes a Line with
an error, and reading goes on: one slip in a million lines should not cost the night.

Out: JSONL. A request's samples are in one record, so one record is one request. Only whole lines are appended, never
changed: where an id comes twice (its prompt has changed, or it was tried again), the last one counts.

Left out on purpose: ranges of sampling parameters (sampling.py checks them), compressed files, threads (one writes).
Formats: JSON, RFC 8259; JSON Lines (jsonlines.org).
"""
from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any, BinaryIO, NamedTuple

MOST_BYTES = 8 << 20  # of one line: a million token ids; a longer one is a file of another kind
MOST_DIGITS = 1000  # of one number
MOST_ID = 500  # characters of an id: all ids are kept while a file is read, to find one that comes twice
SYNC_S = 5.0  # seconds of answers that a power failure may cost

# ------------------------------------------------------------------ one line


class Line(NamedTuple):
    """One request. A broken line has an error, which names it, and neither prompt nor options."""
    number: int                             # of the line in its file, from 1
    id: int | str | None                    # its own, else its number; None if a broken line has none it could use
    prompt: str | list[dict] | list[int] | None  # text, messages {"role", "content"}, or token ids
    options: dict[str, Any]                 # those of OPTIONS that the line gives
    at: float = 0.0                         # arrival in seconds
    error: str | None = None


def _is_whole(x: Any) -> bool:
    return type(x) is int  # a bool is an int, too, but not here


def _is_real(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) <= sys.float_info.max  # neither NaN nor infinite passes


CHECKS = {  # what a value must be, in words: whether it is
    "a whole number": _is_whole,
    "a whole number, at least 0": lambda x: _is_whole(x) and x >= 0,
    "a whole number, at least 1": lambda x: _is_whole(x) and x >= 1,
    "a finite number": _is_real,
    "true or false": lambda x: type(x) is bool,
    "a text": lambda x: type(x) is str,
    "a text, not empty, or a list of such": lambda x: (type(x) is str and x != "") or (
        type(x) is list and all(type(s) is str and s for s in x)),
    "an object of token ids and numbers": lambda x: type(x) is dict and all(
        k.isascii() and k.isdecimal() and len(k) < 20 and _is_real(v) for k, v in x.items()),
    "an object": lambda x: type(x) is dict,
}
OPTIONS = {
    "max_tokens": "a whole number, at least 0", "min_tokens": "a whole number, at least 0",
    "ignore_eos": "true or false", "stop": "a text, not empty, or a list of such", "seed": "a whole number",
    "n": "a whole number, at least 1", "logprobs": "a whole number, at least 0", "priority": "a whole number",
    "temperature": "a finite number", "top_k": "a whole number", "top_p": "a finite number",
    "min_p": "a finite number", "repetition_penalty": "a finite number", "presence_penalty": "a finite number",
    "frequency_penalty": "a finite number", "logit_bias": "an object of token ids and numbers",
    "json_schema": "an object", "regex": "a text", "system": "a text", "raw": "true or false",
}
PROMPTS = {
    "prompt": ("a text", lambda x: type(x) is str),
    "messages": ('a list of {"role", "content"}, both texts', lambda x: type(x) is list and x and all(
        type(m) is dict and m.keys() == {"role", "content"} and all(type(v) is str for v in m.values()) for m in x)),
    "prompt_ids": ("a list of token ids, at least one", lambda x: type(x) is list and x and all(
        _is_whole(i) and i >= 0 for i in x)),
}
KNOWN = [*PROMPTS, "id", "at", *OPTIONS]


def fingerprint(line: Line) -> str:
    """32 hexadecimal digits of what was asked: prompt and options (of a broken line, its error), not id, place or `at`.

    Defaults that a caller puts into `options` count like the line's own. The same in every process and version.

    >>> fingerprint(Line(1, 1, "hi", {"seed": 3})) == fingerprint(Line(9, "b", "hi", {"seed": 3}, at=2.0))
    True
    >>> fingerprint(Line(1, 1, "hi", {"seed": 3})) == fingerprint(Line(1, 1, "hi", {"seed": 4}))
    False
    """
    content = [line.prompt, line.options] if line.error is None else [line.error]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))  # one spelling, ASCII
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def head(line: Line) -> dict:
    """What the record of a line begins with. Of a broken line it is all of the record.

    >>> head(Line(3, None, None, {}, error="line 3: not UTF-8"))["error"]
    'line 3: not UTF-8'
    """
    found = {"id": line.id, "line": line.number, "input": fingerprint(line)}
    return found if line.error is None else {**found, "error": line.error, "finish_reason": "error"}


# ------------------------------------------------------------------ reading


def read_prompts(path: str | os.PathLike) -> Iterator[Line]:
    """The requests in a file ("-": standard input), in order, one line at a time; empty lines are passed over.

    A file whose name ends in .jsonl, or whose first line that is not empty is a JSON object, is JSONL; every other is
    plain text. UTF-8, with or without a byte order mark; lines end in \\n or \\r\\n. A text is taken with its spaces.
    In JSONL null means "not given". Raises ValueError if the file cannot be opened; whatever is wrong with a line is
    its Line's error instead: no UTF-8, no JSON, no prompt or two, unknown keys, wrong types, an id that comes twice.
    """
    name = os.fspath(path)
    if name == "-":
        return _requests(_standard_input(), False)
    try:
        file = open(name, "rb")  # noqa: SIM115  the iterator closes it
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}; give a file of prompts, or - for standard "
                         "input") from None
    return _requests(file, os.fsdecode(name).lower().endswith(".jsonl"))


def _standard_input() -> BinaryIO:
    """subtle: not the buffer of sys.stdin. A thread that waits for its next line holds its lock, and Python, which
    wants it when the program ends, would abort."""
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except (OSError, ValueError):  # no file of the system's: a notebook, a test
        return sys.stdin.buffer


def _requests(file: BinaryIO, jsonl: bool) -> Iterator[Line]:
    ids, known = {}, jsonl  # id -> number of its line
    try:
        for number, raw in _raw_lines(file):
            if raw is not None and not raw.strip():
                continue
            if not known:
                jsonl, known = raw is not None and _is_object(raw), True
            yield _from_json(number, raw, ids) if jsonl else _from_text(number, raw)
    finally:
        if file is not sys.stdin.buffer:
            file.close()


def _raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Each line's number and bytes without its end; None instead of one that is too long to be held."""
    for number in count(1):
        raw = file.readline(MOST_BYTES + 2)
        if not raw:
            return
        if len(raw) == MOST_BYTES + 2 and not raw.endswith(b"\n"):
            while (rest := file.readline(1 << 16)) and not rest.endswith(b"\n"):
                pass
        raw = raw.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        yield number, raw if len(raw) <= MOST_BYTES else None


def _is_object(raw: bytes) -> bool:
    try:
        return isinstance(json.loads(raw.decode()), dict)
    except (ValueError, RecursionError):
        return False


def _decoded(raw: bytes | None) -> str:
    if raw is None:
        raise ValueError(f"longer than {MOST_BYTES:,} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from None


def _from_text(number: int, raw: bytes | None) -> Line:
    try:
        return Line(number, number, _decoded(raw), {})
    except ValueError as error:
        return Line(number, number, None, {}, error=f"line {number}: {error}")


def _from_json(number: int, raw: bytes | None, ids: dict) -> Line:
    own = None
    try:
        item = _object(_decoded(raw))
        if unknown := [key for key in item if key not in KNOWN]:
            unknown = f"unknown key {reprlib.repr(unknown[0])}; known are {', '.join(KNOWN)}"
        item = {key: value for key, value in item.items() if value is not None}
        own = _claim(item.get("id", number), "id" in item, number, ids)  # first: its error can then be told by its id
        if unknown:
            raise ValueError(unknown)
        at = item.get("at", 0.0)
        if not (_is_real(at) and at >= 0):
            raise ValueError(f'"at" is {reprlib.repr(at)}, but must be seconds, a finite number that is at least 0')
        return Line(number, own, _prompt(item), _taken_options(item), float(at))
    except ValueError as error:
        return Line(number, own, None, {}, error=f"line {number}: {error}")


def _claim(own: Any, given: bool, number: int, ids: dict) -> int | str:
    if not (_is_whole(own) or (type(own) is str and len(own) <= MOST_ID)):
        raise ValueError(f'"id" is {reprlib.repr(own)}, but must be a whole number or a text of at most {MOST_ID} '
                         "characters")
    if own in ids:
        raise ValueError(f"id {reprlib.repr(own)}{'' if given else ', its number,'} is that of line {ids[own]} already")
    ids[own] = number
    return own


def _prompt(item: dict) -> str | list:
    found = [key for key in PROMPTS if key in item]
    if len(found) != 1:
        raise ValueError(f"{' and '.join(found) or 'no prompt'}; give one of {', '.join(PROMPTS)}")
    key, = found
    words, legal = PROMPTS[key]
    if not legal(item[key]):
        raise ValueError(f'"{key}" is {reprlib.repr(item[key])}, but must be {words}')
    for option in ("system", "raw"):
        if item.get(option) not in (None, False) and key != "prompt":
            raise ValueError(f'"{option}" goes with "prompt" only, not with "{key}"')
    if item.get("raw") is True and "system" in item:
        raise ValueError('"system" needs the chat template, which "raw" leaves out')
    return item[key]


def _taken_options(item: dict) -> dict[str, Any]:
    """The options of a line, each in one spelling, so that one request has one fingerprint."""
    options = {}
    for name, words in OPTIONS.items():
        if name not in item:
            continue
        value: Any = item[name]
        if not CHECKS[words](value):
            raise ValueError(f'"{name}" is {reprlib.repr(value)}, but must be {words}')
        if name == "stop":
            value = [value] if isinstance(value, str) else value
        elif name == "json_schema":  # as text, which keeps the order of its keys: it is that of the answer's
            value = json.dumps(value, separators=(",", ":"))
        elif name == "logit_bias":
            value, n = {int(k): float(v) for k, v in value.items()}, len(value)
            if len(value) < n:
                raise ValueError('"logit_bias" has a token id twice')
        options[name] = float(value) if words == "a finite number" else value
    return options


def _object(text: str) -> dict:
    """JSON as RFC 8259 has it, which Python's parser is laxer than: no NaN, no key twice, no half surrogate pairs."""
    def constant(name):
        raise ValueError(f"{name} is no JSON")

    def pairs(items):
        found = dict(items)
        if len(found) < len(items):
            raise ValueError("a key comes twice in one object")
        return found

    def whole(digits):
        if len(digits) > MOST_DIGITS:  # Python's own limit may be off, and the time grows with the square
            raise ValueError(f"a number of {len(digits):,} digits")
        return int(digits)

    try:
        item = json.loads(text, parse_constant=constant, object_pairs_hook=pairs, parse_int=whole)
        if "\\u" in text:
            json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair (\\ud800 to \\udfff) is no character") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(item, dict):
        raise ValueError(f"{reprlib.repr(item)} is no JSON object")
    return item


# ------------------------------------------------------------------ writing


class Results:
    """The answers of a run, one JSON record a line. path None or "-" is standard output.

    Without resume a file that is not empty is refused. With resume its records are read: `found` of them, and a last
    line that was cut short is dropped (`dropped` bytes). A line in the middle that is no record is reported, never
    guessed. Raises ValueError for both, for a file that cannot be opened, and for one that another process writes.

    What is asked for again: a record whose "finish_reason" (its own, or that of one of its "samples") is "abort" or
    "error" is not done. That of a broken line is: only another line could change it.
    """

    def __init__(self, path: str | os.PathLike | None = None, resume: bool = False):
        self.name = "-" if path is None else os.fspath(path)
        self.found, self.dropped = 0, 0
        self._last: dict = {}  # see _entry
        self.changed = 0  # lines met by `done` whose record is of another question, other options or another model
        self._file, self._synced, self._regular = None, time.monotonic(), False
        if self.name == "-":
            if resume:
                raise ValueError("standard output cannot be resumed; name a file for the answers")
            return
        # subtle: one descriptor for all: opened, locked, and only then looked at, so that nobody comes in between
        how = (os.O_RDWR if resume else os.O_WRONLY) | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        try:
            self._file = os.open(self.name, how, 0o666)
        except OSError as error:
            raise ValueError(f"{self.name} cannot be written: {error.strerror}; name another file for the "
                             "answers") from None
        try:
            self._begin(resume)
        except BaseException:
            os.close(self._file)
            raise

    def _begin(self, resume: bool) -> None:
        self._regular = stat.S_ISREG(os.fstat(self._file).st_mode)
        if not self._regular:  # a pipe, a terminal, /dev/null
            if resume:
                raise ValueError(f"{self.name} is not a file that could be resumed; name one for the answers")
            return
        try:
            import fcntl

            with suppress(OSError):  # a file system without locks: then it goes without
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed when its holder ends, however
                except BlockingIOError:
                    raise ValueError(f"{self.name} is being written by another process; wait for it, or name another "
                                     "file") from None
        except ImportError:  # Windows
            pass
        size = os.fstat(self._file).st_size
        if resume:
            self._take_up()
        elif size:
            raise ValueError(f"{self.name} holds {size:,} bytes already; add --resume (resume=True) to do what is "
                             "missing, or name another file")

    def _take_up(self) -> None:
        """Notes the records that are there; a last line without its end is mended or dropped."""
        begin = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, raw in enumerate(file, 1):
                try:
                    if raw.strip():
                        key, entry = _entry(json.loads(raw.decode()))
                        self._last[key] = entry
                        self.found += 1
                except (ValueError, RecursionError) as error:
                    cut = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) and not raw.endswith(b"\n")
                    # Only what begins as a record does was one: the last line of anybody else's file is left alone.
                    # A power failure can leave zeros where the data would have been.
                    if not cut or not (raw.startswith(b'{"id": ') or b'{"id": '.startswith(raw.rstrip(b"\0"))):
                        why = "not JSON" if isinstance(error, json.JSONDecodeError) else str(error)
                        raise ValueError(f"{self.name}: line {number} is no record of an earlier run ({why}); mend or "
                                         "remove it, or name another file") from None
                    self.dropped = len(raw)
                    os.ftruncate(self._file, begin)
                else:
                    if not raw.endswith(b"\n"):  # complete but for its end
                        self._append(b"\n")
                begin += len(raw)

    def done(self, line: Line) -> bool:
        """Whether the answer to just this line is there: the last record of its id has its fingerprint, and is not to
        be tried again. Options that were put into the line before writing must be in it here, too."""
        asked = fingerprint(line)
        was, settled = self._last.get(_known_by(line.id, asked), (None, False))
        self.changed += was not in (None, asked)
        return was == asked and (settled or line.error is not None)

    def write(self, record: dict) -> None:
        """Appends a record, which begins with head(line), as one line. NaN and infinities, which JSON has not, become
        null. If it cannot be written as a whole (OSError: the disk is full), none of it stays in the file."""
        key, entry = _entry(record)
        record = {"id": record["id"], **record}  # the id goes first: a cut record is known by it
        try:
            text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        except ValueError:
            text = json.dumps(_without_nan(record), ensure_ascii=False, allow_nan=False)
        data = (text + "\n").encode("utf-8", "backslashreplace")  # which writes half a surrogate pair as JSON does
        if self.name == "-":
            out = getattr(sys.stdout, "buffer", None)  # a notebook has none
            sys.stdout.flush()
            sys.stdout.write(data.decode()) if out is None else out.write(data)
            (sys.stdout if out is None else out).flush()
            return
        assert self._file is not None, "the results are closed"
        self._append(data)
        self._last[key] = entry
        # What the kernel has, a kill leaves; only a power failure does not. So the disk is waited for now and then,
        # which costs milliseconds every few seconds, and not with each record, which could take as long as its tokens.
        if self._regular and time.monotonic() - self._synced >= SYNC_S:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def _append(self, data: bytes) -> None:
        """All of data at the end of the file, by one system call if the kernel takes it in one, or nothing of it."""
        before = os.fstat(self._file).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest):]
        except BaseException:  # Ctrl-C between two halves, too
            if self._regular:
                with suppress(OSError):
                    os.ftruncate(self._file, before)
            raise

    def close(self) -> None:
        """Waits until all is on the disk, and lets others write the file. May be called twice."""
        file, self._file = self._file, None
        if file is not None:
            try:
                if self._regular:
                    os.fsync(file)
            finally:
                os.close(file)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _entry(record: Any) -> tuple[Any, tuple[str, bool]]:
    """What a record is known by, and (its input, whether it is settled)."""
    if not isinstance(record, dict) or not isinstance(record.get("input"), str) or not (
            "id" in record and (record["id"] is None or type(record["id"]) in (int, str))):
        raise ValueError('a record has "id" and "input", as head(line) makes them')
    samples = record.get("samples")
    parts = [record, *(s for s in (samples if isinstance(samples, list) else ()) if isinstance(s, dict))]
    settled = not any(part.get("finish_reason") in ("abort", "error") for part in parts)
    return _known_by(record["id"], record["input"]), (record["input"], settled)


def _known_by(own: int | str | None, asked: str) -> Any:
    return own if own is not None else (asked,)  # a broken line without an id is known by its error


def _without_nan(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _without_nan(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_without_nan(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


# ------------------------------------------------------------------ demo


def demo():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        asked, answered = os.path.join(folder, "prompts.jsonl"), os.path.join(folder, "answers.jsonl")
        with open(asked, "w", encoding="utf-8") as f:
            f.write('{"prompt": "Why is the sky blue?", "id": "sky", "max_tokens": 20}\n'
                    '{"prompt": "Why is grass green?", "id": "grass", "temprature": 0.5}\n'
                    '{"prompt_ids": [1, 17, 4], "at": 0.25}\n'
                    '{"messages": [{"role": "user", "content": "Is snow white?"}], "id": "snow"\n'
                    '{"prompt": "Is coal black?", "stop": "."}\n')
        print("The requests:")
        for line in read_prompts(asked):
            print(f"  {line.id!s:6} at {line.at:4.2f} s  {line.error or (line.prompt, line.options)!s:.90}")

        def run(resume, stop_after=None):
            with Results(answered, resume) as results:
                if resume:
                    print(f"  found {results.found} records and a piece of {results.dropped} bytes, which is dropped")
                for line in read_prompts(asked):
                    if results.done(line):
                        print(f"  line {line.number} is done")
                    else:
                        print(f"  line {line.number} is answered")
                        answer = {"text": f"{line.prompt}: yes.", "finish_reason": "stop"}
                        results.write(head(line) if line.error else {**head(line), **answer})
                    if line.number == stop_after:
                        return

        print("\nA run, killed while it writes its third record:")
        run(False, stop_after=3)
        os.truncate(answered, os.path.getsize(answered) - 25)
        print("\nThe file is resumed:")
        run(True)
        print("\nIts records:")
        with open(answered, encoding="utf-8") as f:
            for text in f:
                print(f"  {text.rstrip():.112}")


if __name__ == "__main__":
    demo()
