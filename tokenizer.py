"""Text to token ids and back: byte-level BPE on tiktoken, SentencePiece's BPE on a heap.

The one idea. A tokenizer is three maps in a row, and each one alone is small:

    text -> pieces    regular expressions cut the text; no token ever crosses a cut                pretokenize
    piece -> ids      its symbols merge in pairs, the best pair first, wherever it is in the       merge
                      piece, until no known pair is left. Symbols are bytes, and the best pair     BytePairs
                      stands first in a list; or (SentencePiece) they are characters, spaces       Pieces
                      written "▁", and the best pair may also be the one with the highest score
    ids -> bytes      a table                                                                      Tokenizer.token_bytes

Reads `tokenizer.json` of the Hugging Face `tokenizers` library (GPT-2, Llama 2 and 3, Qwen 2/2.5/3, SmolLM2, Mistral
and everything built of the same parts), `tokenizer.model` in tiktoken's format (Llama 3) and in SentencePiece's, and
GGUF metadata. For every text the ids are those of the `tokenizers` library, or of SentencePiece where the vocabulary
has scores and no merge list; what is not handled is refused by name, never run wrongly.
Control tokens (`<|im_end|>` and the like) typed by a user stay characters, unless `encode` is told otherwise. Added
tokens that are not control tokens (runs of spaces, user-defined symbols, <think>) are vocabulary, found in any text as
in the libraries; chat.py keeps those that look like tags out of users' messages.

References: Sennrich et al. 2016, arXiv:1508.07909 (BPE); Radford et al. 2019 (byte-level BPE, GPT-2); Kudo and
Richardson 2018, arXiv:1808.06226 (SentencePiece); the documentation of tokenizers and tiktoken; the GGUF specification.
Left out on purpose: Unigram vocabularies, dropout, truncation and padding, token offsets, training.
"""
from __future__ import annotations

import base64
import codecs
import heapq
import json
import math
import re
import struct
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import regex  # the standard `re` has no \p{L}
import tiktoken

# what \s means in these regexes; str.isspace() knows four control codes more
WHITESPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
MAX_FILE = 1 << 27  # bytes; the largest tokenizer.json in use has about 35 MB
MAX_PIECES, MAX_PIECE = 1 << 19, 1000  # SentencePiece's entries, and characters of one; 256,000 and 64 are in use
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


Pair = tuple[int, int]
Found = tuple[int, int]  # (rank, id of the token that the pair makes)


def merge(ids: list[int], find: Callable[[Pair], Found | None]) -> list[int]:
    """Byte-pair encoding: of all neighbours that `find` knows, those of the lowest rank merge first, from left to
    right. A heap of rank * n + position keeps it O(n log n); entries whose pair has changed since are skipped when they
    come up. The list is used up.

    >>> merge([1, 2, 3, 2, 3], {(1, 2): (1, 12), (2, 3): (0, 23), (1, 23): (2, 123)}.get)
    [123, 23]
    """
    n = len(ids)
    before, after = list(range(-1, n - 1)), list(range(1, n + 1))
    heap = [found[0] * n + i for i, pair in enumerate(pairwise(ids)) if (found := find(pair))]
    heapq.heapify(heap)
    while heap:
        rank, i = divmod(heapq.heappop(heap), n)
        j = after[i]
        if j == n or not (found := find((ids[i], ids[j]))) or found[0] != rank:
            continue
        ids[i], ids[j], after[i] = found[1], -1, after[j]  # -1 was absorbed on its left, and is in no pair
        if (j := after[i]) < n:
            before[j] = i
            if found := find((ids[i], ids[j])):
                heapq.heappush(heap, found[0] * n + i)
        if (j := before[i]) >= 0 and (found := find((ids[j], ids[i]))):
            heapq.heappush(heap, found[0] * n + j)
    return [id for id in ids if id != -1]


def merge_list(vocab: dict[str, int], merges: Iterable[Sequence[str]]) -> tuple[dict[Pair, Found], list[int]]:
    """A merge list as a table for `merge`, and rank -> id. Of a pair that is listed twice the last counts."""
    table, made = {}, []
    for rank, (left, right) in enumerate(merges):
        try:
            made.append(vocab[left + right])
            table[vocab[left], vocab[right]] = rank, made[-1]
        except KeyError as error:
            raise ValueError(f"merge {rank} ({left!r}, {right!r}) needs {error} in the vocabulary") from None
    return table, made


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
        self.merges, self.made = merge_list(vocab, merges)
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
        return merge(ids, self.merges.get)

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
        for (a, b), (_, made) in self.merges.items():
            if a not in known or b not in known or made in known:
                return None
            known.add(made)
        if len(self.merges) < len(self.made):  # a pair is listed twice
            return None
        if any(self._merge([self.base[b] for b in self.tokens[id]]) != [id] for id in self.made):
            return None
        return _engine({bytes([b]): b for b in range(256)} |  # a missing byte has a rank that is never asked for
                       {self.tokens[id]: 256 + rank for rank, id in enumerate(self.made)})


def _engine(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """tiktoken's merging of a text taken as one piece: cutting is done before."""
    return tiktoken.Encoding("pieces", pat_str=r"(?s:.)+", mergeable_ranks=ranks, special_tokens={})


# ------------------------------------------------------------------ SentencePiece

class Pieces:
    """Merges the characters of one piece, by a merge list or (from_scores) by scores.

    vocab: text -> id; its single characters are the symbols. find: see `merge`. bytes: value -> id of the tokens that
    spell a character without an id ("byte fallback"). unk: the id for one that they cannot spell; None drops it. fuse:
    a row of those is one unk. whole: as in BytePairs.
    """

    def __init__(self, vocab: dict[str, int], find: Callable[[Pair], Found | None], *, bytes: dict[int, int],
                 unk: int | None, fuse: bool, whole: Iterable[str] = ()):
        self.base = {text: id for text, id in vocab.items() if len(text) == 1}
        self.find, self.bytes, self.unk, self.fuse = find, bytes, unk, fuse
        self.whole = {text: vocab[text] for text in whole}
        self.unlisted: dict[int, str] = {}  # negative ids of characters that have none, but are part of a piece

    @classmethod
    def from_scores(cls, vocab: dict[str, int], scores: Sequence[float], **rest: Any) -> Pieces:
        """As SentencePiece: any two neighbours merge whose texts together are in the vocabulary, the highest score
        (id -> score) first. Several pieces may share a score, and have parts that are no pieces themselves."""
        rank = {score: k for k, score in enumerate(sorted({scores[id] for id in vocab.values()}, reverse=True))}
        unlisted = {-2 - k: char for k, char in enumerate(sorted(set().union(*vocab) - vocab.keys()))}
        table = _Scored({text: (rank[scores[id]], id) for text, id in vocab.items()},
                        unlisted | {id: text for text, id in vocab.items()})
        self = cls(vocab | {char: id for id, char in unlisted.items()}, table.__getitem__, fuse=True, **rest)
        self.unlisted = unlisted
        return self

    def ids(self, piece: str) -> list[int]:
        """Ids of one non-empty, well-formed piece."""
        if piece in self.whole:
            return [self.whole[piece]]
        symbols = list(map(self.base.get, piece))
        ids = merge(self._spelled(piece, symbols) if None in symbols else symbols, self.find)
        if self.unlisted and ids and min(ids) < 0:  # some have not merged, and are spelled like those of no piece
            ids = self._spelled([self.unlisted.get(id) for id in ids], [id if id >= 0 else None for id in ids])
            ids = [id for id, left in zip(ids, [None, *ids]) if not id == left == self.unk]
        return ids

    def _spelled(self, chars: Iterable[str], symbols: Iterable[int | None]) -> list[int]:
        """The symbols with those that are None spelled in bytes, or unk."""
        ids, waiting = [], []  # an unk waits for what may be fused; as in the library, bytes overtake it
        for char, id in zip(chars, symbols):
            if id is not None:
                ids += [*waiting, id]
                waiting = []
            elif None not in (spelled := [self.bytes.get(b) for b in char.encode()]):
                ids += spelled
            else:
                ids += [] if self.fuse else waiting
                waiting = [] if self.unk is None else [self.unk]
        return ids + waiting


class _Scored(dict):
    """(left id, right id) -> (rank, id) or None, looked up through the texts of the two and remembered."""

    def __init__(self, pieces: dict[str, Found], texts: dict[int, str]):
        self.pieces, self.texts = pieces, texts

    def __missing__(self, pair: Pair) -> Found | None:
        left, right = map(self.texts.get, pair)
        if left is None or right is None:  # a byte, unk, or absorbed
            return None
        if len(self) >= 1 << 20:
            self.clear()
        found = self[pair] = self.pieces.get(left + right)
        return found


def word_cut(vocab: Iterable[str]) -> list[regex.Pattern]:
    """Where a text without a pre-tokenizer can be cut all the same, so that words are short and can be remembered:
    between a character x and a "▁", if no token has "x▁" in it. A merge across that place would make a token that has;
    so none ever happens, and left and right of it merge each for itself, in the order in which they would in one piece.
    This needs "▁" to be a token (then no fused unk reaches across), and that no character is dropped and none that is
    spelled in bytes or unk merges.

    >>> word_cut(["▁", "a", "▁▁", ".▁"])[0].findall("▁a▁▁a.▁a▁a")[:-1]
    ['▁a', '▁▁a.▁a', '▁a']
    """
    vocab = set(vocab)
    x = "".join({re.escape(x) for text in vocab if "▁" in text for x in re.findall("([^▁])▁", text)})
    word = f"▁*+(?:[{x}]▁*+|[^▁{x}]++)*+" if x else "▁*[^▁]*"  # an x keeps the "▁" that follow it
    return [regex.compile(word)] if "▁" in vocab and len(x) < 2000 else []


def mark_spaces(text: str, at_start: bool = True, *, prefix: str, squeeze: bool = False) -> str:
    """A stretch of text as SentencePiece writes it: each space is "▁", and one may come in front (the dummy prefix):
    by prefix "each" stretch between added tokens gets one, "once" only that at the start of the text, "never" none;
    "always" and "first" are "each" and "once" where none stands there yet. squeeze: no two spaces in a row, none at
    the ends.

    >>> [mark_spaces(" a b", prefix=prefix) for prefix in ("each", "always", "never")], mark_spaces("", prefix="each")
    (['▁▁a▁b', '▁a▁b', '▁a▁b'], '')
    """
    text = (re.sub(" +", " ", text.lstrip(" ")) if squeeze else text).replace(" ", "▁")
    has = text[:1] == "▁"
    wanted = {"each": True, "once": at_start, "always": not has, "first": at_start and not has, "never": False}[prefix]
    text = "▁" + text if wanted and text else text
    return text.rstrip("▁") if squeeze else text


def piece_bytes(piece: str, fallback: bool = True) -> bytes:
    r"""The bytes that a piece stands for; fallback: <0xE2> is a byte.

    >>> piece_bytes("▁hi"), piece_bytes("<0xE2>")
    (b' hi', b'\xe2')
    """
    byte = fallback and re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode("utf-8", "replace")


def _one_space_less(data: bytes) -> bytes:
    return data.removeprefix(b" ")


# ------------------------------------------------------------------ the tokenizer

Part = tuple[str, int | None]      # ordinary text and None, or "" and the id of an added token
Step = Callable[[str, bool], str]  # (text, whether it is at the start of the whole text) -> the text, changed


def unchanged(text: str, at_start: bool = True) -> str:
    return text


def nfc(text: str, at_start: bool = True) -> str:
    return unicodedata.normalize("NFC", text)


def space_in_front(text: str, at_start: bool = True) -> str:
    return text if not text or text[0] == " " else " " + text


class Added(NamedTuple):
    """A token that is found in the text as it stands, before any cut: a control token, or one like <think>."""

    text: str
    id: int
    special: bool = True      # left out of decoded text
    lstrip: bool = False      # swallows the whitespace before it
    rstrip: bool = False      # swallows the whitespace after it
    normalized: bool = False  # looked for after normalisation instead of before,
    match: str = ""           # then in this spelling


class Tokenizer:
    """Text to ids and back. Make one with from_folder, from_gguf or from_json.

    vocab_size: largest id + 1. bos_id: int or None. eos_ids: the end tokens that the tokenizer's own files name.
    add_bos, add_eos: whether `encode` adds them by default. special: text -> id of all added tokens; special_ids: the
    ids of those that `decode` leaves out. chat_template: Jinja source or None; names: its bos_token, eos_token, ..
    normalize, prepare: what is done to a stretch of text before and after the second search for added tokens; the flag
    says whether it is at the start. shown: the bytes of an added token; first: of these, what begins a text.
    """

    def __init__(self, pairs: BytePairs | Pieces, tokens: dict[int, bytes], cuts: Sequence[str | regex.Pattern], *,
                 added: Iterable[Added] = (), normalize: Step = unchanged, prepare: Step = unchanged,
                 shown: Callable[[str], bytes] = lambda text: text.encode("utf-8", "replace"),
                 first: Callable[[bytes], bytes] = bytes, bos_id: int | None = None, eos_ids: Iterable[int] = (),
                 add_bos: bool = False, add_eos: bool = False, chat_template: str | None = None,
                 names: dict[str, str] | None = None):
        self.pairs, self.cuts = pairs, [compile_cut(cut) if isinstance(cut, str) else cut for cut in cuts]
        self._normalize, self._prepare, self._first = normalize, prepare, first
        added = {token.text: token for token in added if token.text}.values()
        self.special = {token.text: token.id for token in added}
        self.special_ids = frozenset(token.id for token in added if token.special)
        self._tokens = {**tokens, **{t.id: shown(t.match or t.text) for t in added}}
        self.bos_id, self.eos_ids = bos_id, list(dict.fromkeys(eos_ids))
        self.add_bos, self.add_eos = add_bos and bos_id is not None, add_eos and bool(self.eos_ids)
        for id in (*self._tokens, *self.eos_ids, *([] if bos_id is None else [bos_id])):
            if type(id) is not int or not 0 <= id < 1 << 31:
                raise ValueError(f"token id {id!r} is not an integer from 0 to 2**31 - 1")
        if not isinstance(chat_template, str | None):
            raise ValueError(f"the chat template is a {type(chat_template).__name__}, not a text")
        self.vocab_size = max(self._tokens, default=-1) + 1
        self.chat_template, self.names = chat_template, names or {}
        # tokens looked for in the raw text, and those looked for in the normalised text
        self._early, self._late = (_finder({t.match or t.text: t for t in added if t.normalized is late})
                                   for late in (False, True))
        self._cache: dict[str, list[int]] = {}

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Reads a model folder: tokenizer.json with tokenizer_config.json, special_tokens_map.json and
        chat_template.jinja where they exist, else tokenizer.model (SentencePiece's, or Llama 3's; also in original/).
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
                    data = _file_bytes(file)
                    return cls(**(_from_protobuf if data[:1] == b"\n" else _from_tiktoken)(data, config))
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
        """Ids of a text. bos None: the tokenizer's own setting; a BOS is never doubled. An EOS is added if that setting
        has one, unless bos is given or allow_special (a chat prompt is to be continued). allow_special: strings such as
        <|im_end|> become control tokens; otherwise they are characters like any others. restore: a table for
        str.translate, applied to what is left between the added tokens (chat.py disguises their look-alikes so).
        Lone surrogates, which no UTF-8 text can hold, are read as U+FFFD."""
        if bos and self.bos_id is None:
            raise ValueError("this tokenizer has no BOS token, so encode(bos=True) cannot add one")
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        ids: list[int] = []
        for k, (part, id) in enumerate(self._split_added(text, allow_special)):
            ids += self._ordinary(part.translate(restore) if restore else part, k == 0) if id is None else (id,)
        if (self.add_bos if bos is None else bos) and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids + self.eos_ids[:1] if self.add_eos and bos is None and not allow_special else ids

    def _ordinary(self, text: str, at_start: bool) -> list[int]:
        """Ids of normalised text in which nothing is special."""
        ids: list[int] = []
        for piece in pretokenize(self._prepare(text, at_start), self.cuts):
            found = self._cache.get(piece)
            if found is None:
                found = self.pairs.ids(piece)
                if len(piece) < 100:  # a cache of words: bounded in number and in length
                    if len(self._cache) >= 1 << 16:
                        self._cache.clear()
                    self._cache[piece] = found
            ids += found
        return ids

    def _split_added(self, text: str, control: bool) -> Iterator[Part]:
        """The parts of a text: leftmost added token first, the longest at each place. Without `control`, control tokens
        are found as well, but stay text."""
        for k, (part, id) in enumerate(_cut_out(text, *self._early, control)):
            yield from [(part, id)] if id is not None else _cut_out(self._normalize(part, k == 0), *self._late, control)

    # -- ids to text

    def token_bytes(self, id: int, first: bool = False) -> bytes:
        """The bytes of one token; b"" for an id that has none (a hole, or a padded row of the model's vocabulary).
        first: as the first token of a text, where SentencePiece's dummy prefix is not shown."""
        data = self._tokens.get(id, b"")
        return self._first(data) if first else data

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids, from its beginning. Control tokens are left out unless skip_special=False; ids that name no
        token give nothing; bytes that are not UTF-8 give U+FFFD (one for what begins a character, as Python counts)."""
        kept = [data for i in ids if not (skip_special and i in self.special_ids) and (data := self.token_bytes(i))]
        return b"".join([self._first(data) for data in kept[:1]] + kept[1:]).decode("utf-8", "replace")


def _finder(tokens: dict[str, Added]) -> tuple[dict[str, Added], re.Pattern]:
    """Spelling -> token, and a regex that finds any, the longest at each place; of no tokens it finds nothing."""
    return tokens, re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _cut_out(text: str, tokens: dict[str, Added], finder: re.Pattern, control: bool) -> Iterator[Part]:
    last = 0
    for match in finder.finditer(text):
        token, (start, end) = tokens[match.group()], match.span()
        if token.special and not control:
            continue
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


def _pre_tokenizer(parts: list[dict]) -> tuple[list[str], bool]:
    """(regexes in order, whether a space is put in front) of a tokenizer.json pre-tokenizer."""
    *steps, last = parts or [{"type": None}]
    if last["type"] != "ByteLevel":
        raise ValueError(f"the pre-tokenizer {last['type']!r} is not handled, only ByteLevel and SentencePiece's")
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


def _template(node: dict | None) -> tuple[str | None, str | None]:
    """(the token that a post-processor puts in front of a text, the one that it puts behind)"""
    bos = eos = None
    for part in _flat(node, "processors"):
        single = part["single"] if part["type"] == "TemplateProcessing" else None if part["type"] == "ByteLevel" else []
        match single and [item["SpecialToken"]["id"] if "Sequence" not in item else None for item in single]:
            case None | [None]:
                pass
            case [str(bos), None]:
                pass
            case [None, str(eos)]:
                pass
            case [str(bos), None, str(eos)]:
                pass
            case _:
                raise ValueError(f"the post-processor {json.dumps(part)[:200]} is not handled")
    return bos, eos


def _added_tokens(data: dict, config: dict, vocab: dict[str, int], normalize: Step = unchanged) -> list[Added]:
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
        late = bool(entry.get("normalized", not flags["special"]))
        added[text] = Added(text, id, normalized=late, match=normalize(text, True) if late else text, **flags)
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
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise ValueError(f"the model type {model.get('type')!r} is not BPE, the only one that is read")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):  # dropout: ids at random, for training
        if model.get(key):
            raise ValueError(f"the model's {key}={model[key]!r} is not handled; null is")
    if not all(type(id) is int for id in vocab.values()) or len(set(vocab.values())) != len(vocab):
        raise ValueError("the vocabulary does not give each token an integer id of its own")
    before, steps = _flat(data.get("pre_tokenizer"), "pretokenizers"), _flat(data.get("normalizer"), "normalizers")
    pieces = model.get("byte_fallback") or {"Metaspace", "Prepend", "Replace"} & {p["type"] for p in before + steps}
    body = (_json_pieces if pieces else _json_bytes)(model, steps, before, _flat(data.get("decoder"), "decoders"))
    added = _added_tokens(data, config, vocab, body["normalize"])
    ids = {**vocab, **{token.text: token.id for token in added}}
    if len(set(ids.values())) != len(ids):
        raise ValueError("an added token has the id of another token")
    named, (bos, eos) = _named(config, ids), _template(data.get("post_processor"))
    for key, end in (("bos", bos), ("eos", eos)):  # tokenizer_config.json decides, as in transformers
        said = config.get(f"add_{key}_token")
        named[f"add_{key}"] = said if isinstance(said, bool) else end is not None
    return {**body, "added": added, **named, "bos_id": named["bos_id"] if bos is None else ids[bos],
            "eos_ids": named["eos_ids"] if eos is None else [ids[eos], *named["eos_ids"]]}


def _json_bytes(model: dict, steps: list[dict], before: list[dict], _: list[dict]) -> dict[str, Any]:
    """The byte-level parts of a tokenizer.json."""
    vocab, unk, names = model["vocab"], model.get("unk_token"), [step["type"] for step in steps]
    if set(names) - {"NFC"}:
        raise ValueError(f"the normalizer {'+'.join(names)} is not handled, only NFC, and what SentencePiece needs")
    if unk is not None and set(ALPHABET) - set(vocab) and (model.get("fuse_unk") or unk not in vocab):
        raise ValueError(f"bytes without a token together with unk_token={unk!r} and fuse_unk are not handled")
    cuts, space = _pre_tokenizer(before)
    pairs = BytePairs(vocab, _split_merges(model["merges"]), unk=vocab.get(unk),
                      whole=vocab if model.get("ignore_merges") else ())
    again = nfc if steps else unchanged  # what `restore` puts back may compose with the next character
    return {"pairs": pairs, "tokens": pairs.tokens, "cuts": cuts, "normalize": again,
            "prepare": (lambda text, at_start: space_in_front(again(text))) if space else again}


def _json_pieces(model: dict, steps: list[dict], before: list[dict], after: list[dict]) -> dict[str, Any]:
    """The parts of a tokenizer.json that comes from SentencePiece. The space in front is put there by a normalizer
    ("legacy"), or by the pre-tokenizer Metaspace."""
    def refuse(what: str, parts: list[dict]) -> ValueError:
        return ValueError(f"the {what} {json.dumps(parts)[:200]} is not handled in a SentencePiece vocabulary")

    vocab, unk, whole = model["vocab"], model.get("unk_token"), bool(model.get("ignore_merges"))
    if unk is not None and unk not in vocab:
        raise ValueError(f"the unk_token {unk!r} is not in the vocabulary")
    table, _ = merge_list(vocab, _split_merges(model["merges"]))
    spelled = {b: vocab[t] for b in range(256) if (t := f"<0x{b:02X}>") in vocab} if model.get("byte_fallback") else {}
    pairs = Pieces(vocab, table.get, unk=vocab.get(unk), fuse=bool(model.get("fuse_unk")), bytes=spelled,
                   whole=vocab if whole else ())
    steady = (len(spelled) == 256 or unk is not None) and not {pairs.unk, *spelled.values()} & {*chain(*table)}
    normalize, prepare, cuts, fallback = unchanged, unchanged, word_cut(vocab) if steady and not whole else [], True
    match steps:
        case []:
            pass
        case [*prepend, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}] if prepend in (
                [], [{"type": "Prepend", "prepend": "▁"}]):
            normalize = partial(mark_spaces, prefix="each" if prepend else "never")
        case _:
            raise refuse("normalizer", steps)
    match before:
        case []:
            pass
        case [{"type": "Metaspace", "replacement": "▁"} as space]:
            prepare = partial(mark_spaces, prefix=_scheme(space))
            cuts = ["▁[^▁]*|[^▁]+"] if space.get("split", True) else cuts
        case _:
            raise refuse("pre-tokenizer", before)
    match after:
        case [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
              {"type": "Fuse"}, *strip] if strip in ([], [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]):
            first = _one_space_less if strip else bytes
        case [{"type": "Metaspace", "replacement": "▁"} as space]:  # drops each "▁" of the first token, spells no bytes
            first, fallback = bytes if _scheme(space) == "never" else lambda data: data.replace(b" ", b""), False
        case _:
            raise refuse("decoder", after)
    shown = partial(piece_bytes, fallback=fallback)
    return {"pairs": pairs, "tokens": {id: shown(text) for text, id in vocab.items()}, "cuts": cuts, "first": first,
            "normalize": normalize, "prepare": prepare, "shown": shown}


def _scheme(metaspace: dict) -> str:
    scheme = metaspace.get("prepend_scheme") or ("never" if metaspace.get("add_prefix_space") is False else "always")
    return {"always": "always", "first": "first", "never": "never"}[scheme]


def _from_tiktoken(data: bytes, config: dict) -> dict[str, Any]:
    """Tokenizer arguments from Llama 3's tokenizer.model: lines of base64 and rank = id; 256 control tokens follow."""
    ranks = {}
    for line in data.splitlines():
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError("this is neither tiktoken's format nor SentencePiece's, or it is damaged") from None
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


_VARINT = re.compile(rb"[\x80-\xff]{0,9}[\x00-\x7f]")


def _message(data: bytes) -> dict[int, list[int | bytes]]:
    r"""The fields of a protobuf message, number -> values in order: integers, and bytes for all the rest.

    >>> _message(b"\x08\x96\x01" b"\x12\x02hi")
    {1: [150], 2: [b'hi']}
    """
    fields: dict[int, list[int | bytes]] = {}
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        if at > len(data):
            raise ValueError(f"a protobuf field of {size} bytes reaches beyond the end of its message")
        return data[at - size:at]

    def varint() -> int:
        if not (found := _VARINT.match(data, at)):
            raise ValueError("a number in a protobuf message does not end")
        return sum((byte & 127) << 7 * k for k, byte in enumerate(take(len(found[0]))))

    while at < len(data):
        number, wire = divmod(varint(), 8)
        if wire not in (0, 1, 2, 5):
            raise ValueError(f"a protobuf message has a field of the unknown kind {wire}")
        value = varint() if wire == 0 else take({1: 8, 5: 4}.get(wire) or varint())
        fields.setdefault(number, []).append(value)
    return fields


def _from_protobuf(data: bytes, config: dict) -> dict[str, Any]:
    """Tokenizer arguments from SentencePiece's tokenizer.model (sentencepiece_model.proto), by way of GGUF's names."""
    def last(message: dict, key: int, default: Any = None) -> Any:
        return message.get(key, [default])[-1]

    if len(data) > MAX_FILE >> 3:
        raise ValueError(f"{len(data)} bytes are no SentencePiece model; up to {MAX_FILE >> 3} are read")
    model = _message(data)
    trainer, normalizer, denormalizer = (_message(b"".join(model.get(key, ()))) for key in (2, 3, 5))
    if (kind := last(trainer, 3, 1)) != 2:
        kind = {1: "Unigram", 3: "word", 4: "char"}.get(kind, kind)
        raise ValueError(f"the SentencePiece model is of type {kind}, not BPE, the only one that is read")
    for refused, name in ((last(normalizer, 2) or last(denormalizer, 2), "a precompiled_charsmap"),
                          (not last(normalizer, 5, 1), "escape_whitespaces=false"),
                          (last(trainer, 24), "treat_whitespace_as_suffix"),
                          (len(model.get(1, ())) > MAX_PIECES, f"more than {MAX_PIECES} pieces")):
        if refused:
            raise ValueError(f"the SentencePiece model has {name}, which is not handled")
    pieces = [_message(piece) for piece in model.get(1, ())]
    ids = {last(piece, 1, b"").decode(): id for id, piece in enumerate(pieces)}
    kinds = [last(piece, 3, 1) for piece in pieces]
    if len(ids) != len(pieces) or (6 in kinds) != bool(last(trainer, 35)):
        raise ValueError("the SentencePiece model has a piece twice, or byte pieces without byte_fallback, or no such "
                         "pieces with it")
    ends = {f"{name}_token_id": id if (id := last(trainer, field, default)) < len(ids) else None  # -1 has 64 bits
            for name, field, default in (("unknown", 40, 0), ("bos", 41, 1), ("eos", 42, 2), ("padding", 43, 1 << 63))}
    body = _from_gguf({f"tokenizer.ggml.{key}": value for key, value in {
        **ends, "model": "llama", "tokens": list(ids), "token_type": kinds,
        "scores": [struct.unpack("<f", last(piece, 2, bytes(4)))[0] for piece in pieces],
        "add_space_prefix": last(normalizer, 3, 1), "remove_extra_whitespaces": last(normalizer, 4, 1),
        "add_bos_token": config.get("add_bos_token", True), "add_eos_token": config.get("add_eos_token")}.items()})
    more = [t._replace(normalized=False, match="") for t in _added_tokens({}, config, ids) if t.text not in ids]
    named = _named({**body["names"], **config}, {**ids, **{token.text: token.id for token in more}})
    if config.get("legacy") is False and last(normalizer, 3, 1):  # as transformers reads it
        body["normalize"] = partial(body["normalize"], prefix="once")
    return {**body, "added": [*body["added"], *more], **named}


def _from_gguf(metadata: dict) -> dict[str, Any]:
    """Tokenizer arguments from GGUF metadata."""
    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    texts, model, pre = get("tokens"), get("model"), get("pre")
    if model not in ("gpt2", "llama"):
        raise ValueError(f"the tokenizer model {model!r} is not read, only BPE: 'gpt2' and SentencePiece's 'llama'")
    if not texts or set(map(type, texts)) != {str}:
        raise ValueError("tokenizer.ggml.tokens (texts) is needed")
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if model == "llama" else {}
    named = {name: id for name in ("bos", "eos", "eot", "eom", "padding", "unknown")
             if (id := get(f"{name}_token_id", defaults.get(name))) is not None}
    ends = [named[name] for name in ("eos", "eot", "eom") if name in named]
    kinds = get("token_type") or [3 if i in (*ends, named.get("bos")) else 1 for i in range(len(texts))]
    if len(kinds) != len(texts):
        raise ValueError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(texts)} tokens")
    for name, id in named.items():
        if not 0 <= id < len(texts):
            raise ValueError(f"tokenizer.ggml.{name}_token_id is {id}, but there are {len(texts)} tokens")
    body = _gguf_pieces(texts, kinds, get) if model == "llama" else _gguf_bytes(texts, kinds, get("merges"), pre)
    return {**body, "eos_ids": ends, "bos_id": named.get("bos"), "add_eos": bool(get("add_eos_token")),
            "add_bos": bool(get("add_bos_token", model == "llama" or pre in GGUF_LIKE_LLAMA3)),
            "chat_template": metadata.get("tokenizer.chat_template"),
            "names": {key: texts[named[name]] for key, name in (
                ("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown"))
                if name in named}}


def _gguf_bytes(texts: list[str], kinds: Sequence[int], merges: Iterable, pre: str) -> dict[str, Any]:
    if pre not in GGUF_PRE:
        raise ValueError(f"the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not one of {', '.join(GGUF_PRE)}")
    if merges is None:
        raise ValueError("tokenizer.ggml.merges is needed")
    vocab = {text: i for i, text in enumerate(texts)}
    pairs = BytePairs(vocab, _split_merges(merges), whole=[text for text, kind in zip(texts, kinds) if kind == 1]
                      if pre in GGUF_LIKE_LLAMA3 else ())
    tokens = {i: b"" if kinds[i] == 5 else pairs.tokens[vocab[text]] for i, text in enumerate(texts)}  # 5: a filler
    added = [Added(texts[i], i, special=kind != 4) for i, kind in enumerate(kinds) if kind in (2, 3, 4)]
    again = nfc if pre == "qwen2" else unchanged  # llama.cpp has none; the library, with Qwen's tokenizer.json, does
    return {"pairs": pairs, "tokens": tokens, "cuts": GGUF_PRE[pre], "added": added, "normalize": again,
            "prepare": again}


def _gguf_pieces(texts: list[str], kinds: Sequence[int], get: Callable) -> dict[str, Any]:
    """SentencePiece's vocabulary. Each stretch of text between control tokens is a text of its own, as in llama.cpp."""
    scores, n = get("scores"), len(texts)
    if scores is None or get("token_type") is None or get("precompiled_charsmap"):
        raise ValueError("a SentencePiece vocabulary needs scores and token_type, and no precompiled_charsmap")
    if len(scores) != n or not all(isinstance(score, float) and math.isfinite(score) for score in scores):
        raise ValueError(f"tokenizer.ggml.scores holds {len(scores)} scores for {n} tokens, or one that is not finite")
    if n > MAX_PIECES or set(kinds) - set(range(1, 7)) or not all(0 < len(text) <= MAX_PIECE for text in texts):
        raise ValueError(f"up to {MAX_PIECES} pieces of 1 to {MAX_PIECE} characters, with types 1 to 6, are read")
    normal, unknown, control, symbols, unused, spelled = (
        {texts[i]: i for i, k in enumerate(kinds) if k == kind} for kind in range(1, 7))
    values = {piece_bytes(text): id for text, id in spelled.items()}
    if spelled and values.keys() != {bytes([b]) for b in range(256)}:
        raise ValueError(f"the {len(spelled)} pieces that are bytes are not <0x00> to <0xFF>")
    known = normal.keys() | unused.keys()
    for text in unused:  # SentencePiece merges by way of such a piece, and takes it apart again
        if any(all(len(part) == 1 or part in known for part in (text[:k], text[k:])) for k in range(1, len(text))):
            raise ValueError(f"the piece {text!r} is unused, but merges lead to it, which is not handled")
    pairs = Pieces.from_scores(normal, scores, bytes={data[0]: id for data, id in values.items()},
                               unk=next(iter(unknown.values()), None))
    added = [Added(text, id) for text, id in (unknown | control).items()]
    added += [Added(text.replace("▁", " "), id, special=False, normalized=True, match=text)
              for text, id in symbols.items()]  # they take no part in merges, which is as if found late
    dummy, squeeze = bool(get("add_space_prefix", True)), bool(get("remove_extra_whitespaces"))
    return {"pairs": pairs, "tokens": {i: b"" if kinds[i] == 5 else piece_bytes(text, kinds[i] == 6)
                                       for i, text in enumerate(texts)},
            "shown": partial(piece_bytes, fallback=False), "first": _one_space_less if dummy or squeeze else bytes,
            "normalize": partial(mark_spaces, prefix="each" if dummy else "never", squeeze=squeeze), "added": added,
            "cuts": word_cut([*normal, *symbols]) if spelled or unknown else []}


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
        ranked = [(*pairs.merges[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in pairs.merges]
        if not ranked:
            break
        _, made, i = min(ranked)
        symbols[i:i + 2] = [made]
    assert symbols == tokenizer.encode(" lower"), "the heap does the same"
    print(f"   'abc' -> {[names[id] for id in tokenizer.encode('abc')]}: the rank decides, not the id "
          f"(ab is {vocab['ab']}, bc is {vocab['bc']})")

    print("\nSentencePiece: characters, scores, and bytes for what the vocabulary lacks:")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁lower", "er", "low", "lo", "▁low", "▁l"]
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in {
        "model": "llama", "tokens": pieces, "scores": [-float(i) for i in range(len(pieces))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)}.items()})
    for text in ("lower", "low lower", "é"):
        ids = tokenizer.encode(text)
        print(f"   {text!r:12} -> {' '.join(pieces[id] for id in ids):28} -> {tokenizer.decode(ids)!r}")


if __name__ == "__main__":
    demo()
