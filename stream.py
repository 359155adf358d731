"""Text as it comes: token ids to text piece by piece, without half characters and without any part of a stop string.

The one idea. Two things must wait before text may be shown, and each waits in a small automaton that sees every byte or
character once, so that nothing shown is ever taken back:

    bytes        until their character is whole        an incremental UTF-8 decoder, which holds at most 3 bytes
    characters   until no stop string can claim them   Knuth-Morris-Pratt, one automaton a stop string

    stream = StreamDecoder(tokenizer, stop=["###"], prompt_ids=prompt)
    for id in answer: print(stream.push(id), end="")
    print(stream.finish())

The text of an answer is decode(prompt + answer) minus decode(prompt) without its incomplete last character. So a
character that the prompt began is completed here (if the answer has any bytes at all), and the space before the first
word is text wherever something stands before it (after a chat prompt, say); only at the very beginning of all text is
it SentencePiece's dummy prefix, which is not shown.

The tokenizer is an argument. These are used of it, and nothing else:
    token_bytes(id)              the bytes of a token, b"" for an id without any
    token_bytes(id, first=True)  the same at the beginning of all text: without a dummy prefix
    special, special_ids         text -> id of tokens that a stop string may name; the ids that are no text

References: Knuth, Morris and Pratt 1977; the documentation of Python's codecs.
Left out on purpose: regular expressions as stop strings, token offsets, what a terminal or a web page needs.
"""
from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice
from typing import Any


class StreamDecoder:
    """Turns the ids of one answer into text, piece by piece. One per request (and per sample): it keeps state.

    push(id) returns the text that may be shown now, often ""; finish() the rest. Joined they are the final text, and
    nothing is ever taken back: a character is held back until its bytes are complete, and text that may begin a stop
    string until it cannot. The text ends before the first stop string to be completed (the longest if several end at
    one character); `stopped` is then True, and later pushes give "".
    A stop string that is the text of an added token also stops at that token's id (`stop_ids`), which is not in the
    text. prompt_ids: what was generated from; without it the answer is taken for the beginning of all text.
    text: all emitted so far.

    >>> tokenizer = type("T", (), {"special": {}, "special_ids": (), "token_bytes": lambda _, i, first=0: bytes([i])})()
    >>> d = StreamDecoder(tokenizer, stop=["END"])
    >>> [d.push(b) for b in "né. EEND!".encode()], d.stopped
    (['n', '', 'é', '.', ' ', '', 'E', '', '', ''], True)
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), prompt_ids: Sequence[int] = (), *,
                 skip_special: bool = True):
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop must be a list of non-empty texts, not {stop!r}")
        self._token_bytes, self._skip = tokenizer.token_bytes, tokenizer.special_ids if skip_special else ()
        self.stop_ids = frozenset(tokenizer.special[s] for s in stop if s in tokenizer.special)
        self.stopped, self.text, self._held = False, "", ""
        shown = (data for id in reversed(prompt_ids) if id not in self._skip and (data := self._token_bytes(id)))
        before = b"".join(reversed(list(islice(shown, 4))))  # a character has at most 4 bytes
        self._first = not before  # the next token with bytes begins the text
        self._answered = False  # a character that the prompt left incomplete is no text of an answer without bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # holds back the bytes of a broken character
        self._utf8.decode(before)
        # Knuth-Morris-Pratt, one automaton per stop string: _matched[i] characters of _stops[i] end the text so far
        self._stops = [(s, _borders(s)) for s in dict.fromkeys(stop)]
        self._matched = [0] * len(self._stops)

    def push(self, id: int) -> str:
        """Takes the next id of the answer; returns the text that it releases."""
        if not self.stopped and id in self.stop_ids:
            rest, self.stopped = self.finish(), True
            return rest
        if self.stopped or id in self._skip:
            return ""
        data = self._token_bytes(id)
        if data and self._first:
            data, self._first = self._token_bytes(id, first=True), False
        self._answered = self._answered or bool(data)
        return self._release(self._utf8.decode(data))

    def finish(self) -> str:
        """The end of the answer: returns what was held back (an incomplete character as U+FFFD)."""
        if self.stopped:
            return ""
        return self._release(self._utf8.decode(b"", final=True) if self._answered else "", final=True)

    def _release(self, new: str, final: bool = False) -> str:
        """Runs new text through the automata; returns what no stop string can claim any more."""
        text = self._held + new
        for end, char in enumerate(new, len(self._held) + 1):
            if done := self._advance(char):
                self.stopped, text = True, text[:end - done]
                break
        sure = len(text) if self.stopped or final else len(text) - max(self._matched, default=0)
        self._held = text[sure:]
        self.text += text[:sure]
        return text[:sure]

    def _advance(self, char: str) -> int:
        """Moves the automata on by one character; returns the length of the longest stop string that it ends, or 0."""
        for s, (stop, border) in enumerate(self._stops):
            k = self._matched[s]
            while k and stop[k] != char:
                k = border[k - 1]
            self._matched[s] = k + (stop[k] == char)
        return max((k for k, (stop, _) in zip(self._matched, self._stops) if k == len(stop)), default=0)


def _borders(text: str) -> list[int]:
    """KMP's table: for each prefix, the length of its longest proper border (a prefix that is also a suffix).

    >>> _borders("aabaaa")
    [0, 1, 0, 1, 2, 2]
    """
    table, k = [0] * len(text), 0
    for i in range(1, len(text)):
        while k and text[i] != text[k]:
            k = table[k - 1]
        k += text[i] == text[k]
        table[i] = k
    return table


# ------------------------------------------------------------------ demo

def demo() -> None:
    """Half characters, a stop string that comes in parts, and the space in front of a first word."""
    class Pieces:
        """The smallest tokenizer that will do: ids 0..255 are bytes, the rest a few pieces."""

        special, special_ids, pieces = {"</s>": 256}, {256}, {256: b"</s>", 257: b" Hello", 258: b" #", 259: b"##!"}

        def token_bytes(self, id: int, first: bool = False) -> bytes:
            data = self.pieces[id] if id in self.pieces else bytes([id])
            return data.removeprefix(b" ") if first else data

    tokenizer = Pieces()
    print("What is pushed, and what may be shown at once:")
    stream = StreamDecoder(tokenizer, stop=["###"])
    for id in (257, *" 😀".encode(), 258, 257, 258, 259, 257):
        print(f"   {tokenizer.token_bytes(id)!r:12} -> {stream.push(id)!r}{'   stopped' * stream.stopped}")
    print(f"   text: {stream.text!r}")

    print("\nThe space of a first word belongs to the text where something stands before it:")
    for prompt in ([], [256], [*b"[/INST]"]):
        stream = StreamDecoder(tokenizer, prompt_ids=prompt)
        before = b"".join(map(tokenizer.token_bytes, prompt))
        print(f"   after {before!r:12} {stream.push(257)!r}")


if __name__ == "__main__":
    demo()
