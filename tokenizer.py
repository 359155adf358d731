"""Text to token ids and back: byte-level BPE on tiktoken, and text that streams.

The one idea. A tokenizer is three maps in a row, and each one alone is small:

    text -> pieces    regular expressions cut the text; no token ever crosses a cut            pretokenize
    piece -> ids      every byte is a symbol; the pair that stands first in the merge list
                      merges first, wherever it is in the piece, until no listed pair is left  BytePairs
    ids -> bytes      a table; bytes become text only once a character is whole                StreamDecoder

Reads `tokenizer.json` of the Hugging Face `tokenizers` library (GPT-2, Llama 3, Qwen 2/2.5/3, SmolLM2 and everything
built of the same parts), Llama 3's `tokenizer.model` (tiktoken's format) and GGUF metadata. For every text the ids are
those of the `tokenizers` library, whatever the vocabulary; what is not handled is refused by name, never run wrongly.
Control tokens (`<|im_end|>` and the like) typed by a user stay characters, unless `encode` is told otherwise.

References: Sennrich et al. 2016, arXiv:1508.07909 (BPE); Radford et al. 2019 (byte-level BPE, GPT-2); the documentation
of tokenizers and tiktoken; the GGUF specification.
Left out on purpose: SentencePiece and Unigram vocabularies, dropout, truncation and padding, token offsets, training.
"""
from __future__ import annotations

import base64
import codecs
import heapq
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import regex  # the standard `re` has no \p{L}
import tiktoken

# what \s means in these regexes; str.isspace() knows four control codes more
WHITESPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
MAX_FILE = 1 << 27  # bytes; the largest tokenizer.json in use has about 35 MB
HEAP_BYTES = 1 << 20  # of text that BytePairs merges before it asks whether tiktoken can take over

# ------------------------------------------------------------------ text to pieces

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" \
         r"|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
DIGIT = r"\p{N}"

# tokenizer.ggml.pre -> the cuts, one after the other; the names of a row share their regexes in llama.cpp's llama-vocab
GGUF_PRE = {
    **dict.fromkeys(("gpt-2", "olmo"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), (DIGIT, GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (QWEN2,)),
}
GGUF_LIKE_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3")  # takes whole pieces; BOS unless the file says no

# The syntax that is let through to `regex`: that on which it and the library's Oniguruma agree (literals, \p, groups,
# look-ahead, simple classes), and in which a short pattern cannot blow up (no repeated groups, no long counts)
_SHARED_SYNTAX = re.compile(
    r"(?:\\[pP]\{\^?\w+\}|\\[sSrnt]|\\[^\w\s]|\(\?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d\)|\(\?:|\(\?[=!]|\((?!\?)|\)\??(?![*+?{])|[|*+?.]|\{\d(?:,\d?)?\}(?![*+?{])"
    r"|\[\^?(?:\\[pP]\{\^?\w+\}|\\[sSrnt]|\\[^\w\s]|[^\[\]\\&])+\]|[^\\()\[\]{}|*+?.^$])*")


def compile_cut(pattern: str) -> regex.Pattern:
    """Compiles one pre-tokenizer regex from a model file; ValueError for a syntax that engines read differently."""
    if not isinstance(pattern, str) or len(pattern) > 1_000 or not _SHARED_SYNTAX.fullmatch(pattern):
        raise ValueError(f"the pre-tokenizer's regex {str(pattern)[:200]!r} uses syntax that is not handled")
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pre-tokenizer's regex {pattern[:200]!r} does not compile: {error}") from None


def pretokenize(text: str, cuts: Sequence[regex.Pattern]) -> list[str]:
    r"""Cuts text into the pieces inside which BPE works; joined they are the text. Each cut works on the pieces of the
    one before; what a regex does not match is a piece of its own ("isolated" in the tokenizers library).

    >>> pretokenize("I'LL pay 12345\n\n", [compile_cut(LLAMA3)])
    ['I', "'LL", ' pay', ' ', '123', '45', '\n\n']
    >>> pretokenize("I'LL pay 12345\n\n", [compile_cut(GPT2)])
    ['I', "'", 'LL', ' pay', ' 12345', '\n\n']
    """
    pieces = [text]
    for cut in cuts:
        whole, pieces = pieces, []
        for piece in whole:
            edges = [0]
            try:  # the limit is for regexes of strangers that backtrack for ever; real ones read megabytes a second
                for match in cut.finditer(piece, timeout=10 + len(piece) / 100_000):
                    edges += match.span()
            except TimeoutError:
                raise ValueError(f"the pre-tokenizer's regex {cut.pattern[:200]!r} backtracks for ever") from None
            edges.append(len(piece))
            pieces += [piece[a:b] for a, b in pairwise(edges) if a < b]
    return pieces


# ------------------------------------------------------------------ one piece to ids

def byte_alphabet() -> str:
    """The printable characters by which vocabulary files write the 256 bytes: a byte's own where it is visible Latin-1,
    else the next of U+0100.. in byte order (68 bytes, 0xAD among them).

    >>> a = byte_alphabet(); a[ord("a")], a[ord(" ")], a[0xAD], a[0xFF], len(set(a))
    ('a', 'Ġ', 'Ń', 'ÿ', 256)
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(b if b in visible else next(others)) for b in range(256))


ALPHABET = byte_alphabet()
_CODEC = codecs.charmap_build(ALPHABET)


def token_to_bytes(token: str) -> bytes | None:
    """The bytes that a vocabulary entry stands for; None if it is not written in the byte alphabet.

    >>> token_to_bytes("Ġhi"), token_to_bytes("<a b>")
    (b' hi', None)
    """
    try:
        return codecs.charmap_encode(token, "strict", _CODEC)[0]
    except UnicodeEncodeError:
        return None


class BytePairs:
    """Merges the bytes of one piece; the ids are exactly those of the `tokenizers` library's BPE model.

    vocab: token -> id. merges: (left, right) tokens, the first in the list merges first. whole: tokens that are taken
    as they are when they make up a piece ("ignore_merges"). unk: the id for bytes that the vocabulary lacks; None drops
    those before anything merges, which makes their neighbours adjacent, as in the library.
    Raises ValueError for a merge whose parts or result are not in the vocabulary.

    Two engines. A heap follows the definition. tiktoken is twice as fast, but merges any two neighbours whose
    *concatenation* has a rank where the library merges *listed pairs* only. It takes over where there is much text, if
    it agrees (for GPT-2, Qwen, SmolLM2; not for Llama 3's list in Hugging Face form), which takes a second to find out.
    """

    def __init__(self, vocab: dict[str, int], merges: Iterable[tuple[str, str]], *, whole: Iterable[str] = (),
                 unk: int | None = None):
        self.tokens = {id: token_to_bytes(token) or token.encode("utf-8", "replace") for token, id in vocab.items()}
        self.whole = {data: vocab[token] for token in whole if (data := token_to_bytes(token))}
        self.base = [vocab.get(char, unk) for char in ALPHABET]  # byte -> id
        self.missing = bytes(b for b, char in enumerate(ALPHABET) if char not in vocab)
        self.merges: dict[tuple[int, int], int] = {}  # (left id, right id) -> rank; listed twice, the last counts
        self.made: list[int] = []                     # rank -> id of the token that this merge makes
        for rank, (left, right) in enumerate(merges):
            try:
                self.merges[vocab[left], vocab[right]] = rank
                self.made.append(vocab[left + right])
            except KeyError as error:
                raise ValueError(f"merge {rank} ({left!r}, {right!r}) needs {error} in the vocabulary") from None
        self.rank_ids: Sequence[int] = self.base + self.made  # tiktoken's rank -> id
        self.merged = 0  # bytes so far

    @classmethod
    def from_ranks(cls, ranks: dict[bytes, int]) -> BytePairs:
        """A vocabulary in tiktoken's format, bytes -> rank = id, all 256 bytes in it: tiktoken is the definition."""
        self = cls({}, ())
        self.tokens, self.missing, self.rank_ids = {id: token for token, id in ranks.items()}, b"", range(len(ranks))
        self.engine, self.merged = _engine(ranks), math.inf
        return self

    def ids(self, piece: str) -> list[int]:
        """Ids of one non-empty, well-formed piece."""
        data = piece.encode()
        if data in self.whole:
            return [self.whole[data]]
        self.merged += len(data)
        if self.merged > HEAP_BYTES and self.engine and len(data.translate(None, self.missing)) == len(data):
            return [self.rank_ids[rank] for rank in self.engine.encode_ordinary(piece)]
        return self._merge([self.base[b] for b in data if self.base[b] is not None])

    def _merge(self, ids: list[int]) -> list[int]:
        """The lowest rank first, from left to right. A heap of rank * n + position keeps it O(n log n); entries whose
        pair has changed since are skipped when they come up."""
        n, merges, made = len(ids), self.merges, self.made
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))
        heap = [merges[pair] * n + i for i, pair in enumerate(pairwise(ids)) if pair in merges]
        heapq.heapify(heap)
        while heap:
            rank, i = divmod(heapq.heappop(heap), n)
            j = after[i]
            if j == n or merges.get((ids[i], ids[j])) != rank:
                continue
            ids[i], ids[j], after[i] = made[rank], -1, after[j]  # -1 was absorbed on its left, and is in no merge
            if (j := after[i]) < n:
                before[j] = i
                if (rank := merges.get((ids[i], ids[j]))) is not None:
                    heapq.heappush(heap, rank * n + i)
            if (j := before[i]) >= 0 and (rank := merges.get((ids[j], ids[i]))) is not None:
                heapq.heappush(heap, rank * n + j)
        return [id for id in ids if id >= 0]

    @cached_property
    def engine(self) -> tiktoken.Encoding | None:
        """tiktoken, where it gives the same ids for every text, else None.

        It does if (1) each token is made by one merge, (2) its parts are bytes or made earlier in the list, and (3) its
        bytes, merged alone, end in it. By (2) a merge makes only pairs of later rank, so ranks are worked off in
        ascending order. Let two neighbours spell token t at some moment. No merge has crossed the borders of that
        stretch (parts only grow), so it went exactly as the bytes of t go alone, and by (3) and (1) those two are the
        listed pair: what tiktoken may merge there, the library may too, at the same rank.
        """
        known = {id for b, id in enumerate(self.base) if b not in self.missing}
        for (a, b), rank in self.merges.items():
            if a not in known or b not in known or self.made[rank] in known:
                return None
            known.add(self.made[rank])
        if len(self.merges) < len(self.made):  # a pair is listed twice
            return None
        if any(self._merge([self.base[b] for b in self.tokens[id]]) != [id] for id in self.made):
            return None
        return _engine({bytes([b]): b for b in range(256)} |  # a missing byte has a rank that is never asked for
                       {self.tokens[id]: 256 + rank for rank, id in enumerate(self.made)})


def _engine(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """tiktoken's merging of a text taken as one piece: cutting is done before."""
    return tiktoken.Encoding("pieces", pat_str=r"(?s:.)+", mergeable_ranks=ranks, special_tokens={})


# ------------------------------------------------------------------ the tokenizer

class Added(NamedTuple):
    """A token that is found in the text as it stands, before any cut: a control token, or one like <think>."""

    text: str
    id: int
    special: bool = True      # left out of decoded text
    lstrip: bool = False      # swallows the whitespace before it
    rstrip: bool = False      # swallows the whitespace after it
    normalized: bool = False  # looked for after normalisation instead of before


class Tokenizer:
    """Text to ids and back. Make one with from_folder, from_gguf or from_json.

    vocab_size: largest id + 1. bos_id: int or None. eos_ids: the end tokens that the tokenizer's own files name.
    add_bos: whether `encode` puts a BOS in front by default. special: text -> id of all added tokens; special_ids: the
    ids of those that `decode` leaves out. chat_template: Jinja source or None; names: its bos_token, eos_token, ..
    """

    def __init__(self, pairs: BytePairs, tokens: dict[int, bytes], cuts: Sequence[str], *, added: Iterable[Added] = (),
                 nfc: bool = False, prefix_space: bool = False, bos_id: int | None = None, eos_ids: Iterable[int] = (),
                 add_bos: bool = False, chat_template: str | None = None, names: dict[str, str] | None = None):
        self.pairs, self.cuts = pairs, [compile_cut(cut) for cut in cuts]
        self._nfc, self._prefix_space = nfc, prefix_space
        added = {token.text: token for token in added if token.text}.values()
        self.special = {token.text: token.id for token in added}
        self.special_ids = frozenset(token.id for token in added if token.special)
        self._tokens = {**tokens, **{token.id: token.text.encode("utf-8", "replace") for token in added}}
        self.bos_id, self.eos_ids, self.add_bos = bos_id, list(dict.fromkeys(eos_ids)), add_bos and bos_id is not None
        for id in (*self._tokens, *self.eos_ids, *([] if bos_id is None else [bos_id])):
            if type(id) is not int or not 0 <= id < 1 << 31:
                raise ValueError(f"token id {id!r} is not an integer from 0 to 2**31 - 1")
        if not isinstance(chat_template, str | None):
            raise ValueError(f"the chat template is a {type(chat_template).__name__}, not a text")
        self.vocab_size = max(self._tokens, default=-1) + 1
        self.chat_template, self.names = chat_template, names or {}
        # tokens looked for in the raw text, and those looked for in the normalised text
        self._by_match = {self._normalize(t.text) if t.normalized else t.text: t for t in added}
        self._finders = [_finder(text for text, t in self._by_match.items() if t.normalized is late)
                         for late in (False, True)]
        self._cache: dict[str, list[int]] = {}

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Reads a model folder: tokenizer.json with tokenizer_config.json, special_tokens_map.json and
        chat_template.jinja where they exist, else Llama 3's tokenizer.model (also in original/).
        Raises FileNotFoundError if there is neither, ValueError for what is damaged or not handled."""
        folder = Path(path)
        config = {**_json_file(folder / "special_tokens_map.json"), **_json_file(folder / "tokenizer_config.json")}
        jinja = folder / "chat_template.jinja"
        if jinja.is_file():
            config["chat_template"] = _file_bytes(jinja).decode("utf-8", "replace")
        if (folder / "tokenizer.json").is_file():
            return cls.from_json(_json_file(folder / "tokenizer.json"), config, source=str(folder / "tokenizer.json"))
        for file in (folder / "tokenizer.model", folder / "original" / "tokenizer.model"):
            if file.is_file():
                with _reading(str(file)):
                    return cls(**_from_tiktoken(_file_bytes(file), config))
        raise FileNotFoundError(f"{folder} has neither tokenizer.json nor tokenizer.model, so there is no tokenizer")

    @classmethod
    def from_json(cls, data: dict, config: dict | None = None, *, source: str = "tokenizer.json") -> Tokenizer:
        """From a parsed tokenizer.json and, optionally, tokenizer_config.json (BOS, EOS, chat template)."""
        with _reading(source):
            return cls(**_from_tokenizers(data, config or {}))

    @classmethod
    def from_gguf(cls, metadata: dict) -> Tokenizer:
        """From a GGUF file's metadata (plain dict of str, int, bool and lists): the keys tokenizer.ggml.* and
        tokenizer.chat_template."""
        with _reading("the GGUF metadata"):
            return cls(**_from_gguf(metadata))

    # -- text to ids

    def encode(self, text: str, *, bos: bool | None = None, allow_special: bool = False,
               restore: dict[int, str] | None = None) -> list[int]:
        """Ids of a text. bos None: the tokenizer's own setting; a BOS is never doubled. allow_special: strings such as
        <|im_end|> become control tokens; otherwise they are characters like any others. restore: a table for
        str.translate, applied to what is left between the control tokens (chat.py disguises their look-alikes so).
        Lone surrogates, which no UTF-8 text can hold, are read as U+FFFD."""
        if bos and self.bos_id is None:
            raise ValueError("this tokenizer has no BOS token, so encode(bos=True) cannot add one")
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        ids: list[int] = []
        for part, id in self._split_added(text) if allow_special else ((text, None),):
            ids += self._ordinary(part.translate(restore) if restore else part) if id is None else (id,)
        wanted = self.add_bos if bos is None else bos
        return [self.bos_id, *ids] if wanted and ids[:1] != [self.bos_id] else ids

    def _normalize(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self._nfc else text

    def _ordinary(self, text: str) -> list[int]:
        """Ids of text in which nothing is special."""
        text = self._normalize(text)
        if self._prefix_space and text and text[0] != " ":
            text = " " + text
        ids: list[int] = []
        for piece in pretokenize(text, self.cuts):
            found = self._cache.get(piece)
            if found is None:
                found = self.pairs.ids(piece)
                if len(piece) < 100:  # a cache of words: bounded in number and in length
                    if len(self._cache) >= 1 << 16:
                        self._cache.clear()
                    self._cache[piece] = found
            ids += found
        return ids

    def _split_added(self, text: str) -> Iterator[tuple[str, int | None]]:
        """(ordinary text, None) and ("", id of an added token), in order. Leftmost first, the longest at each place."""
        for part, id in self._cut_out(text, self._finders[0]):
            yield from [(part, id)] if id is not None else self._cut_out(self._normalize(part), self._finders[1])

    def _cut_out(self, text: str, finder: re.Pattern) -> Iterator[tuple[str, int | None]]:
        last = 0
        for match in finder.finditer(text):
            token, (start, end) = self._by_match[match.group()], match.span()
            if token.lstrip:
                start = last + len(text[last:start].rstrip(WHITESPACE))
            if token.rstrip:
                end = len(text) - len(text[end:].lstrip(WHITESPACE))
            if start > last:
                yield text[last:start], None
            yield "", token.id
            last = max(last, end)
        if last < len(text):
            yield text[last:], None

    # -- ids to text

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token; b"" for an id that has none (a hole, or a padded row of the model's vocabulary)."""
        return self._tokens.get(id, b"")

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids. Control tokens are left out unless skip_special=False; ids that name no token give nothing;
        bytes that are not UTF-8 give U+FFFD."""
        kept = (i for i in ids if not (skip_special and i in self.special_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")


def _finder(texts: Iterable[str]) -> re.Pattern:
    """A regex that finds any of the texts, the longest at each place; of no texts it finds nothing."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


# ------------------------------------------------------------------ reading vocabulary files

def _file_bytes(path: Path) -> bytes:
    if (size := path.stat().st_size) > MAX_FILE:
        raise ValueError(f"{path} has {size} bytes; more than {MAX_FILE} is no tokenizer file")
    return path.read_bytes()


def _json_file(path: Path) -> dict:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(_file_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a JSON {type(data).__name__}, not an object")
    return data


@contextmanager
def _reading(source: str) -> Iterator[None]:
    """Whatever shape untrusted data has, what comes out is one ValueError that names its source."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    except (TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        raise ValueError(f"{source} is damaged: {type(error).__name__}: {str(error)[:200]}") from error


def _split_merges(merges: Iterable) -> Iterator[Sequence[str]]:
    """Merges as "a b" or ["a", "b"]. Only pairs can hold a token with a space; a "#version" line is no merge.

    >>> list(_split_merges(["#version: 0.2", "a b", ["c d", "e"]]))
    [['a', 'b'], ['c d', 'e']]
    """
    for merge in merges:
        if isinstance(merge, str) and merge.startswith("#version"):
            continue
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if len(pair) != 2 or not all(pair):
            raise ValueError(f"merge {merge!r} is not two tokens")
        yield pair


def _flat(node: dict | None, key: str) -> list[dict]:
    """The parts of a normalizer, pre-tokenizer or post-processor, with Sequences opened."""
    if node is None:
        return []
    return [part for child in node[key] for part in _flat(child, key)] if node.get("type") == "Sequence" else [node]


def _pre_tokenizer(node: dict | None) -> tuple[list[str], bool]:
    """(regexes in order, whether a space is put in front) of a tokenizer.json pre-tokenizer."""
    *steps, last = _flat(node, "pretokenizers") or [{"type": None}]
    if last["type"] != "ByteLevel":
        origin = " (it comes from SentencePiece)" if last["type"] == "Metaspace" else ""
        raise ValueError(f"the pre-tokenizer {last['type']!r} is not byte-level{origin}; only byte-level BPE is read")
    cuts, space = [], bool(last.get("add_prefix_space"))
    for step in steps:
        match step:
            case {"type": "Digits"}:
                cuts.append(DIGIT if step.get("individual_digits") else DIGIT + "+")
            case {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated"} if not step.get("invert"):
                cuts.append(cut)
            case _:
                raise ValueError(f"the pre-tokenizer {json.dumps(step)[:200]} is not handled")
    if space and steps:
        raise ValueError("add_prefix_space after another pre-tokenizer is not handled")
    return [*cuts, GPT2] if last.get("use_regex", True) else cuts, space


def _template_bos(node: dict | None) -> str | None:
    """The token that a post-processor puts in front of a text, or None."""
    bos = None
    for part in _flat(node, "processors"):
        match part:
            case {"type": "ByteLevel"} | {"type": "TemplateProcessing", "single": [{"Sequence": _}]}:
                pass
            case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": bos}}, {"Sequence": _}]}:
                pass
            case _:
                raise ValueError(f"the post-processor {json.dumps(part)[:200]} is not handled")
    return bos


def _added_tokens(data: dict, config: dict, vocab: dict[str, int]) -> list[Added]:
    """The added tokens of tokenizer.json, and those that only tokenizer_config.json has."""
    more = [{**entry, "id": int(id)} for id, entry in (config.get("added_tokens_decoder") or {}).items()]
    added: dict[str, Added] = {}
    for entry in [*(data.get("added_tokens") or []), *more]:
        text, id = entry["content"], entry["id"]
        if text in added:
            continue
        if vocab.get(text, id) != id:
            raise ValueError(f"the added token {text!r} has id {id}, and {vocab[text]} in the vocabulary")
        if entry.get("single_word"):
            raise ValueError(f"the added token {text!r} has single_word set, which is not handled")
        flags = {key: bool(entry.get(key)) for key in ("special", "lstrip", "rstrip")}
        added[text] = Added(text, id, normalized=bool(entry.get("normalized", not flags["special"])), **flags)
    return list(added.values())


def _named(config: dict, special: dict[str, int]) -> dict[str, Any]:
    """The Tokenizer arguments that tokenizer_config.json gives. There a token is a text, or an object with one as its
    content; of several chat templates the one named "default" counts."""
    names = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        name = config.get(key)
        if isinstance(name := name.get("content") if isinstance(name, dict) else name, str):
            names[key] = name
    template, eos = config.get("chat_template"), names.get("eos_token")
    if isinstance(template, list):
        template = next((item["template"] for item in template if item["name"] == "default"), None)
    return {"names": names, "chat_template": template, "bos_id": special.get(names.get("bos_token", "")),
            "eos_ids": [special[eos]] if eos in special else []}


def _from_tokenizers(data: dict, config: dict) -> dict[str, Any]:
    """Tokenizer arguments from a tokenizer.json."""
    model, vocab = data["model"], data["model"]["vocab"]
    if model.get("byte_fallback"):
        raise ValueError("this vocabulary comes from SentencePiece (byte_fallback); only byte-level BPE is read")
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise ValueError(f"the model type {model.get('type')!r} is not BPE, the only one that is read")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ValueError(f"{key}={model[key]!r} is not handled")
    steps = [part["type"] for part in _flat(data.get("normalizer"), "normalizers")]
    if set(steps) - {"NFC"}:
        raise ValueError(f"the normalizer {'+'.join(steps)} is not handled, only NFC")
    if not all(type(id) is int for id in vocab.values()) or len(set(vocab.values())) != len(vocab):
        raise ValueError("the vocabulary does not give each token an integer id of its own")
    added = _added_tokens(data, config, vocab)
    ids = {**vocab, **{token.text: token.id for token in added}}
    if len(set(ids.values())) != len(ids):
        raise ValueError("an added token has the id of another token")
    unk = model.get("unk_token")
    if unk is not None and set(ALPHABET) - set(vocab) and (model.get("fuse_unk") or unk not in vocab):
        raise ValueError(f"bytes without a token together with unk_token={unk!r} and fuse_unk are not handled")
    cuts, space = _pre_tokenizer(data.get("pre_tokenizer"))
    pairs = BytePairs(vocab, _split_merges(model["merges"]), unk=vocab.get(unk),
                      whole=vocab if model.get("ignore_merges") else ())
    arguments, add_bos = _named(config, ids), config.get("add_bos_token")
    if (bos := _template_bos(data.get("post_processor"))) is not None:
        arguments["bos_id"] = ids[bos]
    return {"pairs": pairs, "tokens": pairs.tokens, "cuts": cuts, "prefix_space": space, "added": added,
            "nfc": bool(steps), "add_bos": add_bos if isinstance(add_bos, bool) else bos is not None, **arguments}


def _from_tiktoken(data: bytes, config: dict) -> dict[str, Any]:
    """Tokenizer arguments from Llama 3's tokenizer.model: lines of base64 and rank = id; 256 control tokens follow."""
    ranks = {}
    for line in data.splitlines():
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError("this is not tiktoken's format; it comes from SentencePiece, which is not read, or is "
                             "damaged") from None
    n = len(ranks)
    if n != 128_000 or sorted(ranks.values()) != list(range(n)) or not all(bytes([b]) in ranks for b in range(256)):
        raise ValueError(f"there are {n} tokens, not the 128000 of Llama 3; such a file does not say which regex and "
                         "control tokens another model has")
    names = ["begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1",
             "finetune_right_pad_id", "reserved_special_token_2", "start_header_id", "end_header_id", "eom_id",
             "eot_id", "python_tag", *(f"reserved_special_token_{i}" for i in range(3, 248))]
    added = [Added(f"<|{name}|>", n + i) for i, name in enumerate(names)]
    named = _named({"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", **config},
                   {token.text: token.id for token in added})
    pairs = BytePairs.from_ranks(ranks)
    return {"pairs": pairs, "tokens": pairs.tokens, "cuts": [LLAMA3], "added": added, "add_bos": True, **named}


def _from_gguf(metadata: dict) -> dict[str, Any]:
    """Tokenizer arguments from GGUF metadata."""
    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    texts, merges, model, pre = get("tokens"), get("merges"), get("model"), get("pre")
    if model != "gpt2":
        hint = " (it comes from SentencePiece)" if model == "llama" else ""
        raise ValueError(f"the tokenizer model {model!r}{hint} is not read, only byte-level BPE ('gpt2')")
    if pre not in GGUF_PRE:
        raise ValueError(f"the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not one of {', '.join(GGUF_PRE)}")
    if not texts or merges is None or set(map(type, texts)) != {str}:
        raise ValueError("tokenizer.ggml.tokens (texts) and tokenizer.ggml.merges are needed")
    named = {name: id for name in ("bos", "eos", "eot", "eom", "padding", "unknown")
             if (id := get(f"{name}_token_id")) is not None}
    ends = [named[name] for name in ("eos", "eot", "eom") if name in named]
    kinds = get("token_type") or [3 if i in (*ends, named.get("bos")) else 1 for i in range(len(texts))]
    if len(kinds) != len(texts):
        raise ValueError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(texts)} tokens")
    for name, id in named.items():
        if not 0 <= id < len(texts):
            raise ValueError(f"tokenizer.ggml.{name}_token_id is {id}, but there are {len(texts)} tokens")
    like_llama3, vocab = pre in GGUF_LIKE_LLAMA3, {text: i for i, text in enumerate(texts)}
    pairs = BytePairs(vocab, _split_merges(merges),
                      whole=[text for text, kind in zip(texts, kinds) if kind == 1] if like_llama3 else ())
    tokens = {i: b"" if kinds[i] == 5 else pairs.tokens[vocab[text]] for i, text in enumerate(texts)}  # 5: a filler
    added = [Added(texts[i], i, special=kind != 4) for i, kind in enumerate(kinds) if kind in (2, 3, 4)]
    return {"pairs": pairs, "tokens": tokens, "cuts": GGUF_PRE[pre], "added": added, "eos_ids": ends,
            "bos_id": named.get("bos"), "add_bos": bool(get("add_bos_token", like_llama3)),
            "nfc": pre == "qwen2",  # llama.cpp does not normalise; the library, with Qwen's tokenizer.json, does
            "chat_template": metadata.get("tokenizer.chat_template"),
            "names": {key: texts[named[name]] for key, name in (
                ("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown"))
                if name in named}}


# ------------------------------------------------------------------ text as it comes

class StreamDecoder:
    """Turns the ids of one answer into text, piece by piece. One per request (and per sample): it keeps state.

    push(id) returns the text that may be shown now, often ""; finish() the rest. Joined they are the final text, and
    nothing is ever taken back: a character is held back until its bytes are complete, and text that may begin a stop
    string until it cannot. The text ends before the first stop string to be completed (the longest if several end at
    one character); `stopped` is then True, and later pushes give "".
    A stop string that is the text of an added token also stops at that token's id (`stop_ids`), which is not in the
    text. prompt_ids: what was generated from; a character begun there is completed here. text: all emitted so far.

    >>> tokenizer = type("T", (), {"special": {}, "special_ids": (), "token_bytes": lambda self, i: bytes([i])})()
    >>> d = StreamDecoder(tokenizer, stop=["END"])
    >>> [d.push(b) for b in "né. EEND!".encode()], d.stopped
    (['n', '', 'é', '.', ' ', '', 'E', '', '', ''], True)
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt_ids: Sequence[int] = (), *,
                 skip_special: bool = True):
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop must be a list of non-empty texts, not {stop!r}")
        self._token_bytes, self._skip = tokenizer.token_bytes, tokenizer.special_ids if skip_special else ()
        self.stop_ids = frozenset(tokenizer.special[s] for s in stop if s in tokenizer.special)
        self.stopped, self.text, self._held = False, "", ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # holds back the bytes of a broken character
        self._utf8.decode(b"".join(map(self._token_bytes, prompt_ids[-4:])))  # a character has at most 4 bytes
        # Knuth-Morris-Pratt, one automaton per stop string: _matched[i] characters of _stops[i] end the text so far
        self._stops = [(s, _borders(s)) for s in dict.fromkeys(stop)]
        self._matched = [0] * len(self._stops)

    def push(self, id: int) -> str:
        """Takes the next id of the answer; returns the text that it releases."""
        if not self.stopped and id in self.stop_ids:
            rest, self.stopped = self.finish(), True
            return rest
        return "" if self.stopped or id in self._skip else self._release(self._utf8.decode(self._token_bytes(id)))

    def finish(self) -> str:
        """The end of the answer: returns what was held back (an incomplete character as U+FFFD)."""
        if self.stopped:
            return ""
        return self._release(self._utf8.decode(b"", final=True), final=True)

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
    """From characters to ids and back, on a vocabulary of 256 bytes and ten merges."""
    merges = ["Ġ l", "o w", "Ġl ow", "e r", "Ġlow er", "ð Ł", "ðŁ ĺ", "a b", "b c", "e s"]
    made = [merge.replace(" ", "") for merge in merges]
    vocab = {token: id for id, token in enumerate([*ALPHABET, *reversed(made)])}  # ids on purpose not in merge order
    tokenizer = Tokenizer.from_json({"model": {"type": "BPE", "vocab": vocab, "merges": merges},
                                     "pre_tokenizer": {"type": "ByteLevel"}})

    print("Where each family cuts (no token crosses a bar):")
    for name, cuts in (("GPT-2", [GPT2]), ("Llama 3", [LLAMA3]), ("Qwen2", [QWEN2]), ("SmolLM2", [DIGIT, GPT2])):
        print(f"  {name:8}", " | ".join(map(repr, pretokenize("I'LL pay 12345\n\n", list(map(compile_cut, cuts))))))

    print("\nOne piece, the first pair of the merge list first:")
    pairs, names = tokenizer.pairs, {id: token for token, id in vocab.items()}
    symbols = [pairs.base[b] for b in b" lower"]
    while True:
        print("  ", " ".join(names[id] for id in symbols).ljust(14), symbols)
        ranked = [(pairs.merges[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in pairs.merges]
        if not ranked:
            break
        rank, i = min(ranked)
        symbols[i:i + 2] = [pairs.made[rank]]
    assert symbols == tokenizer.encode(" lower"), "the heap does the same"
    print(f"   'abc' -> {[names[id] for id in tokenizer.encode('abc')]}: the rank decides, not the id "
          f"(ab is {vocab['ab']}, bc is {vocab['bc']})")

    print("\nA stream holds back half a character, and what may be a stop string:")
    decoder = StreamDecoder(tokenizer, stop=["###"])
    for id in tokenizer.encode("lower 😀 # ###!"):
        print(f"   {id:3} {tokenizer.token_bytes(id)!r:12} -> {decoder.push(id)!r}")
    print(f"   text {decoder.text!r}, stopped by a stop string: {decoder.stopped}")


if __name__ == "__main__":
    demo()
