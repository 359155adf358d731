"""Answers that keep to a form: JSON of a schema, or a text that a regex matches as a whole.

    vocabulary = Vocabulary(tokenizer, vocab_size=49152, eos_ids=[2])
    grammar = vocabulary.json_schema({"type": "object", "properties": {"age": {"type": "integer"}}})
    allowed = grammar.start()                  one for each answer
    allowed([])                                (V,) bool: the ids that may come first
    allowed([107, 18])                         those that may come behind these two

The one idea. A language model knows tokens, a grammar knows characters; between the two stands a question that has to
be answered before every token: which of all V tokens leave an answer that can still be completed? A mask says it, and
sampling needs nothing else: what is forbidden gets probability 0, before anything that looks at probabilities (top-k
first, and it might keep forbidden tokens alone), and the rest is renormalised.

The protocol is a plain function, ids -> mask, of the ids that an answer has so far. It has no state that anybody could
see, so there is nothing to save, roll back or mix up: a draft that was refused, a step that failed and an answer that
was interrupted are just another list of ids. Whoever wants to write one by hand needs no library (see the demo).
What makes it fast is private: the parser stays where it was, and goes back and forth over what differs.

The parser is that of llguidance (Rust; an Earley parser over a lexer of regex derivatives, run over a trie of the
vocabulary), which is imported when the first Vocabulary is made, and only then: pip install llguidance.

What is allowed, exactly: an id whose bytes, behind those of the ids before it, begin some text of the grammar, however
it is cut into tokens (llguidance would force its own cut where the text is forced; that is switched off: it would need
to tokenize as this model does, and a schema could force a million bytes at once). An end-of-text id where the text may
end. No other control token, and no id without bytes. A text is UTF-8, so half a character is allowed where the other
half can follow. The model is not told what the form is: say it in the prompt too, or it will be led, and ramble.

Limits, since a schema may come from a stranger: MOST_CHARS, MOST_REGEX; LIMITS inside llguidance, on the work of
compiling and of each step and on memory; no references to files or to the net; and no more than MOST_SPACE characters
of white space between two things of a JSON text, which a small model might else write for ever.
References: Willard and Louf 2023 (arXiv 2307.09702); the documentation of llguidance; JSON Schema 2020-12.
Left out on purpose: other grammars (Lark, which llguidance has), forced tokens without a pass of the model (a draft for
`verify` could bring them), masks made beside the model's pass.
Shape letter: V vocabulary.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

MOST_CHARS = 65_536  # of a schema
MOST_REGEX = 4_096  # characters of a regex, or of all those in a schema: memory grows with the square (30,000: 1.8 GB)
MOST_SPACE = 20  # white space in a row between two things of a JSON text; "x-guidance" in a schema can say otherwise
LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # work on all regexes of a grammar before the first token, about 20 ms
    "step_lexer_fuel": 200_000,       # .. in one step, about 15 ms
    "step_max_items": 50_000,         # of the parser, in one step, about 3 ms
    "max_items_in_row": 2_000,        # .. at one byte: how ambiguous a grammar may be
    "max_lexer_states": 50_000,       # 1 to 2 kB each
    "max_grammar_size": 200_000,      # symbols in all rules
}


class Vocabulary:
    """The tokens of a model, in the shape in which grammars are matched against them; takes half a second, once.

    tokenizer: token_bytes(id) and special_ids are used of it. vocab_size: V of the model, whose vocabulary may be
    padded; None: the tokenizer's. eos_ids: what ends an answer; None: the tokenizer's.
    Raises ValueError if llguidance is not installed, or if nothing could end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None = None, eos_ids: Iterable[int] | None = None):
        try:
            self.library = import_module("llguidance")
        except ImportError as error:
            raise ValueError("structured output (json_schema, regex) needs a package that is not installed: pip "
                             f"install llguidance ({error})") from None
        self.size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.ends = sorted({i for i in (tokenizer.eos_ids if eos_ids is None else eos_ids) if 0 <= i < self.size})
        if not self.ends:
            raise ValueError("this model names no end-of-text token, so an answer that keeps to a form could not end")
        control = sorted({i for i in tokenizer.special_ids if 0 <= i < self.size} | set(self.ends))
        self.control = torch.tensor(control)  # allowed where the text may end, or never
        # what llguidance asks of a tokenizer; it would call it to cut forced texts, which is switched off
        self.tokenizer = self.library.LLTokenizer(SimpleNamespace(
            is_tokenizer_wrapper=True, tokens=[tokenizer.token_bytes(i) for i in range(self.size)],
            special_token_ids=control, eos_token_id=self.ends[0], bos_token_id=None))

    def json_schema(self, schema: dict | bool | str) -> Grammar:
        """JSON texts that a schema (or its text) describes; ValueError, in one sentence, if it cannot be followed.

        The keys of an object come in the order in which the schema lists them. What llguidance does not know (`not`,
        `uniqueItems`, ..) is refused rather than ignored.
        """
        if isinstance(schema, str):
            _check_size("json_schema", schema, MOST_CHARS)
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            schema = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"json_schema is no JSON: {error!s:.200}") from None
        _check_size("json_schema", text, MOST_CHARS)
        if not isinstance(schema, (dict, bool)):
            raise ValueError(f"json_schema is {text:.80}, but must be an object")
        _check_size("the regexes of json_schema together", "".join(_regexes(schema)), MOST_REGEX)
        if schema is True:
            schema = {}
        if isinstance(schema, dict):
            own = schema.get("x-guidance", {})
            if isinstance(own, dict) and not {"whitespace_pattern", "whitespace_flexible"} & set(own):
                schema = {**schema, "x-guidance": {**own, "whitespace_pattern": rf"[ \n\r\t]{{0,{MOST_SPACE}}}"}}
        return Grammar(self, "json_schema", f"%json {json.dumps(schema)}")

    def regex(self, pattern: str) -> Grammar:
        r"""Texts that a regex matches from end to end (syntax of Rust's regex crate: no look-around, no references
        back, `.` is no newline, \d and \w are Unicode's); ValueError, in one sentence, if it is none."""
        if not isinstance(pattern, str):
            raise ValueError(f"regex is {pattern!r:.80}, but must be a text")
        _check_size("regex", pattern, MOST_REGEX)
        if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # it would take the delimiter behind it for its own
            raise ValueError(f"regex {pattern!r:.80} ends in half an escape")
        return Grammar(self, "regex", f"/{self.library.regex_to_lark(pattern, '')}/")


def _check_size(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise ValueError(f"{name}: {len(text):,} characters, but there may be {most:,}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: half of a surrogate pair is no character") from None


def _regexes(schema: Any) -> list[str]:
    """All that a schema would have compiled as a regex, wherever it stands.

    >>> _regexes({"items": [{"pattern": "a+"}], "patternProperties": {"^x": {}}, "properties": {"pattern": {}}})
    ['^x', 'a+']
    """
    found, left = [], [schema]
    while left:
        x = left.pop()
        if isinstance(x, dict):
            found += [x[key] for key in ("pattern", "whitespace_pattern") if isinstance(x.get(key), str)]
            found += x["patternProperties"] if isinstance(x.get("patternProperties"), dict) else []
            left += x.values()
        elif isinstance(x, list):
            left += x
    return found


class Grammar:
    """What answers must look like. `start` begins one answer."""

    def __init__(self, vocabulary: Vocabulary, name: str, rule: str):
        self.vocabulary, library = vocabulary, vocabulary.library
        limits = library.LLParserLimits(**LIMITS, verbose_errors=False)
        self._first = library.LLMatcher(vocabulary.tokenizer, f'%llguidance {{"no_forcing": true}}\nstart: {rule}',
                                        log_level=0, limits=limits)
        try:
            _complain(self._first)
            self.start()([])  # what shows only when it is used: no text at all that these tokens could spell
        except RuntimeError as error:
            raise ValueError(f"{name} cannot be followed: {error}") from None

    def start(self) -> Matcher:
        """What one answer may say; n answers take n of them."""
        return Matcher(self)

    def copy(self) -> Any:
        """llguidance's matcher at the beginning of a text."""
        return self._first.deep_copy()


class Matcher:
    """allowed(ids) -> (V,) bool on the CPU: what may come behind ids, which are allowed ones without an end.

    A pure function, to look at; asked along one text, from token to token, it does not start anew. `consumed` and
    `undone` count the tokens that it went over, and back over. RuntimeError: ids that the grammar does not allow; a
    limit of llguidance (on the lexer's states, which all answers of one Grammar share); no token that could follow, as
    in a vocabulary that lacks letters.
    """

    def __init__(self, grammar: Grammar):
        self.grammar, self.consumed, self.undone = grammar, 0, 0
        self._matcher, self._ids = None, []

    def __call__(self, ids: Sequence[int]) -> Tensor:
        ids, vocabulary = list(ids), self.grammar.vocabulary
        matcher, have = self._matcher, self._ids
        self._matcher, self._ids = None, []  # whatever happens from here (an interrupt, too), the next call starts anew
        matcher = self.grammar.copy() if matcher is None else matcher
        same = len(have)
        while have[:same] != ids[:same]:
            same -= 1
        if same < len(have):
            matcher.rollback(len(have) - same)
        new = ids[same:]
        done = matcher.try_consume_tokens(new) if new else 0
        _complain(matcher)
        if done < len(new):
            raise RuntimeError(f"token id {new[done]} is not allowed behind {same + done} tokens")
        bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)     # (V / 8 or more,)
        _complain(matcher)  # subtle: behind an error the mask is that of the end of text
        allowed = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).view(-1)[: vocabulary.size].bool()
        allowed[vocabulary.control] = False
        if matcher.is_accepting():
            allowed[vocabulary.ends] = True
        self.consumed, self.undone = self.consumed + len(new), self.undone + len(have) - same
        self._matcher, self._ids = matcher, ids
        return allowed


def _complain(matcher: Any) -> None:
    """RuntimeError with what is wrong with one of llguidance's matchers, if anything is, in one line.

    >>> _complain(SimpleNamespace(get_error=lambda: 'at 1(8): bad\\n   1 | start: x'))
    Traceback (most recent call last):
    RuntimeError: bad
    """
    text = matcher.get_error()
    if not text:
        return
    text = text.split("\n   1 |")[0].removesuffix("<non-verbose/>")  # without the lines that it quotes
    if text.startswith("at ") and "): " in text:  # a place in our own wrapping
        text = text.split("): ", 1)[1]
    text = " ".join(text.removeprefix("failed to compile JSON schema: ").rsplit("\nerror: ", 1)[-1].split())
    raise RuntimeError(f"{'no token can follow' if text == 'NoExtensionBias' else text:.300}")


# ------------------------------------------------------------------ demo


def demo() -> None:
    """A matcher by hand, and one by llguidance if it is there, choose from what a model that knows nothing proposes."""
    tokens = ["1", "2", ".", "0", "12", ".5", "yes", "the", "<end>"]
    end = len(tokens) - 1

    def number(ids: Sequence[int]) -> Tensor:
        """Digits, then perhaps a point and more digits, written by hand: a state is what has been said."""
        text = "".join(tokens[i] for i in ids)
        mask = [set(t) <= set("0123456789.") and (text + t).count(".") < 2 and not (text + t).startswith(".")
                for t in tokens]
        mask[end] = text != "" and not text.endswith(".")
        return torch.tensor(mask)

    def answer(allowed, tokens, end, seed) -> list[str]:
        """One token after the other, each as likely as the others that are allowed; the end takes half."""
        generator, ids = torch.Generator().manual_seed(seed), []
        while len(ids) < 12:
            mask = allowed(ids)
            weights = mask.double()
            weights[end] *= weights.sum()
            ids.append(int(torch.multinomial(weights, 1, generator=generator)))
            if ids[-1] == end:
                break
        return [tokens[i] for i in ids]

    print("A matcher by hand, of numbers; the tokens are", *tokens)
    for ids in ([], [4], [4, 2], [4, 2, 1]):
        can = " ".join(t for t, ok in zip(tokens, number(ids).tolist()) if ok)
        print(f"  behind {''.join(tokens[i] for i in ids) or 'nothing'!r:8} {can}")
    print("  answers:", "  ".join("|".join(answer(number, tokens, end, seed)) for seed in range(4)))

    words = [*'"{}: nameA7', '"na', 'me"', '"name"', "Ann", "nn", "<end>"]
    toy = SimpleNamespace(vocab_size=len(words), eos_ids=[len(words) - 1], special_ids=[len(words) - 1],
                          token_bytes=lambda i: words[i].encode())
    try:
        vocabulary = Vocabulary(toy)
    except ValueError as error:
        print(f"\nOne by a library: {error}")
        return
    schema = {"type": "object", "properties": {"name": {"enum": ["Ann", "A", "Annn"]}}, "required": ["name"],
              "additionalProperties": False, "x-guidance": {"whitespace_pattern": " ?"}}
    print("\nBy a library; the tokens are", *words)
    for title, grammar in (("JSON like " + json.dumps({"name": "Ann"}), vocabulary.json_schema(schema)),
                           ("the regex (Ann ){2,3}7+", vocabulary.regex("(Ann ){2,3}7+"))):
        print(f"  {title}:")
        for seed in range(3):
            print("   ", "|".join(answer(grammar.start(), words, len(words) - 1, seed)))


if __name__ == "__main__":
    demo()
