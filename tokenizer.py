"""Text to token ids and back: byte-level BPE on tiktoken, SentencePiece's BPE on a heap.

The one idea. A tokenizer is three maps in a row, and each one alone is small:

    text -> pieces    regular expressions cut the text; no token ever crosses a cut                pretokenize
    piece -> ids      its symbols merge in pairs, the best pair first, wherever it is in the       merge
                      piece, until no known pair is left. Symbols are bytes, and the best pair     BytePairs
                      stands first in a list; or (SentencePiece) they are characters, spaces       Pieces
                      written "▁", and the best pair may also be the one with the highest score
    ids -> bytes      a table                                                                      Tokenizer.token_bytes

What a vocabulary is comes as plain data, Tokenizer(**vocabulary); vocab.py reads it from the files of models:

    kind       "bytes": byte-level BPE; "pieces": SentencePiece's BPE over characters, with "▁" for a space
    vocab      what merging can make -> id: bytes, or text; those of length 1 are what it starts from
    merges     [(left id, right id, id that they make)], the first merges first; None: any two neighbours merge that
               make an entry of vocab, the highest score first, or (bytes, as in tiktoken) the lowest id
    scores     (pieces without merges) a list, id -> score
    whole      entries of vocab that are taken as they are where one is a whole piece ("ignore_merges")
    unk, fuse  id for bytes or characters without one, None: they are dropped; (pieces) whether a row of unk is one
    fallback   (pieces) byte -> id of the tokens that spell a character without an id
    cuts       regexes that cut a text into pieces; each works on the pieces of the one before
    normalize  what is done to text before added tokens marked `normalized` are looked for, {} for nothing: nfc=True;
               space="▁", written for " "; squeeze=True, no two spaces in a row and none at the ends; prefix, a space in
               front of "each" stretch between added tokens, or "once", at the start of the text; "always" and "first"
               are these two where none stands there yet; "never"
    prepare    what is done after that search, in the same terms
    tokens     id -> bytes, of all tokens
    added      tokens found in the text before it is cut, dicts: text, id, special (a control token, left out of decoded
               text), lstrip, rstrip (swallows the whitespace there), normalized, match (the text as it is found)
    first      what the first token of a text is shown without: "" nothing, "space" one in front, "spaces" every "▁"
    bos_id, eos_ids, add_bos, add_eos    id or None; the end tokens that the files name; what `encode` adds by default
    chat_template, names                 Jinja source or None; the texts of bos_token, eos_token, .. for it

For every text the ids are those of the `tokenizers` library, or of SentencePiece where there are scores.
Control tokens (`<|im_end|>` and the like) typed by a user stay characters, unless `encode` is told otherwise. Added
tokens that are not control tokens (runs of spaces, user-defined symbols, <think>) are vocabulary, found in any text as
in the libraries; chat.py keeps those that look like tags out of users' messages.

References: Sennrich et al. 2016, arXiv:1508.07909 (BPE); Radford et al. 2019 (byte-level BPE, GPT-2); Kudo and
Richardson 2018, arXiv:1808.06226 (SentencePiece); the documentation of tokenizers and tiktoken.
Left out on purpose: Unigram vocabularies, dropout, truncation and padding, token offsets, training.
"""
from __future__ import annotations

import heapq
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import regex  # the standard `re` has no \p{L}
import tiktoken

# what \s means in these regexes; str.isspace() knows four control codes more
WHITESPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
HEAP_BYTES = 1 << 20  # of text that BytePairs merges before it asks whether tiktoken can take over

# ------------------------------------------------------------------ text to pieces

# The syntax that is let through to `regex`: that on which it and the library's Oniguruma agree (literals, \p, groups,
# look-ahead, simple classes), and in which a short pattern cannot blow up (no repeated groups, no long counts)
_SHARED_SYNTAX = re.compile(
    r"(?:\\[pP]\{\^?\w+\}|\\[sSrnt]|\\[^\w\s]|\(\?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d\)|\(\?:|\(\?[=!]"
    r"|\((?!\?)|\)\??(?![*+?{])|[|*+?.]|\{\d(?:,\d?)?\}(?![*+?{])"
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

    >>> cuts = [compile_cut(r"\p{N}{1,3}"), compile_cut(r" ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")]
    >>> pretokenize("I'LL pay 12345\n\n", cuts)
    ['I', "'", 'LL', ' pay', ' ', '123', '45', '\n\n']
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


def merge_table(merges: Iterable[tuple[int, int, int]]) -> dict[Pair, Found]:
    """A merge list as a table for `merge`. Of a pair that is listed twice the last counts."""
    return {(left, right): (rank, made) for rank, (left, right, made) in enumerate(merges)}


class BytePairs:
    """Merges the bytes of one piece; the ids are exactly those of the `tokenizers` library's BPE model. Arguments: see
    the top. Bytes without an id are dropped before anything merges, which makes their neighbours adjacent, as in the
    library.

    Two engines. A heap follows the definition. tiktoken is twice as fast, but merges any two neighbours whose
    *concatenation* has a rank where the library merges *listed pairs* only. It takes over where there is much text, if
    it agrees (for GPT-2, Qwen, SmolLM2; not for Llama 3's list in Hugging Face form), which takes a second to find out.
    Without a merge list tiktoken is the definition, and serves all text.
    """

    def __init__(self, vocab: dict[bytes, int], merges: Sequence[tuple[int, int, int]] | None = None, *,
                 whole: Iterable[bytes] = (), unk: int | None = None):
        self.whole = {data: vocab[data] for data in whole}
        self.base = [vocab.get(bytes([b]), unk) for b in range(256)]  # byte -> id
        self.missing = bytes(b for b in range(256) if bytes([b]) not in vocab)
        self.merges, self.made = merge_table(merges or ()), [id for _, _, id in merges or ()]
        self.rank_ids: Sequence[int] = self.base + self.made  # tiktoken's rank -> id
        self.merged: float = 0  # bytes so far
        if merges is None:
            self.rank_ids, self.engine, self.merged = range(max(vocab.values()) + 1), _engine(vocab), math.inf

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
        known = {id: bytes([b]) for b, id in enumerate(self.base) if b not in self.missing}  # id -> its bytes
        for (a, b), (_, made) in self.merges.items():
            if a not in known or b not in known or made in known:
                return None
            known[made] = known[a] + known[b]
        if len(self.merges) < len(self.made):  # a pair is listed twice
            return None
        if any(self._merge([self.base[b] for b in known[id]]) != [id] for id in self.made):
            return None
        return _engine({bytes([b]): b for b in range(256)} |  # a missing byte has a rank that is never asked for
                       {known[id]: 256 + rank for rank, id in enumerate(self.made)})


def _engine(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """tiktoken's merging of a text taken as one piece: cutting is done before."""
    return tiktoken.Encoding("pieces", pat_str=r"(?s:.)+", mergeable_ranks=ranks, special_tokens={})


# ------------------------------------------------------------------ SentencePiece

class Pieces:
    """Merges the characters of one piece, by a merge list as the `tokenizers` library does, or by scores as
    SentencePiece: any two neighbours merge whose texts together are in the vocabulary, the highest score first; several
    entries may share a score, and have parts that are no entries themselves. Arguments: see the top.

    cuts: where a text can be cut before, without any effect on its ids.
    """

    def __init__(self, vocab: dict[str, int], merges: Iterable[tuple[int, int, int]] | None = None,
                 scores: Sequence[float] = (), *, whole: Iterable[str] = (), unk: int | None = None, fuse: bool = False,
                 fallback: dict[int, int] | None = None):
        self.base = {text: id for text, id in vocab.items() if len(text) == 1}
        self.whole = {text: vocab[text] for text in whole}
        self.unk, self.fuse, self.fallback = unk, fuse, fallback or {}
        self.unlisted: dict[int, str] = {}  # negative ids of characters that have none, but are part of an entry
        if merges is None:
            rank = {score: k for k, score in enumerate(sorted({scores[id] for id in vocab.values()}, reverse=True))}
            self.unlisted = {-2 - k: char for k, char in enumerate(sorted(set().union(*vocab) - vocab.keys()))}
            self.base |= {char: id for id, char in self.unlisted.items()}
            self.find = _Scored({text: (rank[scores[id]], id) for text, id in vocab.items()},
                                self.unlisted | {id: text for text, id in vocab.items()}).__getitem__
            merging = set(vocab.values())
        else:
            table = merge_table(merges)
            self.find, merging = table.get, set(chain(*table))
        steady = len(self.fallback) == 256 or unk is not None  # no character is dropped
        steady = steady and not self.whole and merging.isdisjoint({unk, *self.fallback.values()})
        self.cuts = word_cut(vocab) if steady else []

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
            elif None not in (spelled := [self.fallback.get(b) for b in char.encode()]):
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


def rewrite(text: str, at_start: bool = True, *, nfc: bool = False, space: str = " ", squeeze: bool = False,
            prefix: str = "never") -> str:
    """What is done to a stretch of text, by the settings `normalize` or `prepare` (see the top). A "▁" in front of a
    stretch is SentencePiece's dummy prefix; an empty stretch gets none.

    >>> [rewrite(" a b", space="▁", prefix=prefix) for prefix in ("each", "always", "never")]
    ['▁▁a▁b', '▁a▁b', '▁a▁b']
    """
    text = unicodedata.normalize("NFC", text) if nfc else text
    text = (re.sub(" +", " ", text.lstrip(" ")) if squeeze else text).replace(" ", space)
    has = text[:1] == space
    wanted = {"each": True, "once": at_start, "always": not has, "first": at_start and not has, "never": False}[prefix]
    text = space + text if wanted and text else text
    return text.rstrip(space) if squeeze else text


# ------------------------------------------------------------------ the tokenizer

Part = tuple[str, int | None]  # ordinary text and None, or "" and the id of an added token
FIRST = {"": bytes, "space": lambda data: data.removeprefix(b" "), "spaces": lambda data: data.replace(b" ", b"")}


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
    """Text to ids and back. The arguments are those of a vocabulary as plain data (see the top).

    vocab_size: largest id + 1. bos_id: int or None. eos_ids: the end tokens that the tokenizer's own files name.
    add_bos, add_eos: whether `encode` adds them by default. special: text -> id of all added tokens; special_ids: the
    ids of those that `decode` leaves out. chat_template: Jinja source or None; names: its bos_token, eos_token, ..

    >>> vocab, tokens = {b"a": 0, b"b": 1, b"ab": 2}, {0: b"a", 1: b"b", 2: b"ab", 3: b"<e>"}
    >>> t = Tokenizer(kind="bytes", vocab=vocab, merges=[(0, 1, 2)], tokens=tokens, added=[{"text": "<e>", "id": 3}])
    >>> t.encode("abba<e>", allow_special=True), t.decode([2, 1, 0, 3])
    ([2, 1, 0, 3], 'abba')
    """

    def __init__(self, *, kind: str, vocab: dict, tokens: dict[int, bytes], merges: Sequence | None = None,
                 scores: Sequence[float] | None = None, whole: Iterable = (), unk: int | None = None,
                 fuse: bool = False, fallback: dict[int, int] | None = None, cuts: Iterable[str] = (),
                 normalize: dict | None = None, prepare: dict | None = None, added: Iterable[dict] = (),
                 first: str = "", bos_id: int | None = None, eos_ids: Iterable[int] = (), add_bos: bool = False,
                 add_eos: bool = False, chat_template: str | None = None, names: dict[str, str] | None = None):
        if kind not in ("bytes", "pieces"):
            raise ValueError(f"the vocabulary's kind is {kind!r}, but must be 'bytes' or 'pieces'")
        self.cuts = [compile_cut(cut) for cut in cuts]
        if kind == "bytes":
            self.pairs: Any = BytePairs(vocab, merges, whole=whole, unk=unk)
        else:
            self.pairs = Pieces(vocab, merges, scores, whole=whole, unk=unk, fuse=fuse, fallback=fallback)
            self.cuts = self.cuts or self.pairs.cuts
        self._normalize, self._prepare = (partial(rewrite, **x or {}) for x in (normalize, prepare))  # type: Any, Any
        added = {token.text: token for token in (Added(**entry) for entry in added)}.values()
        self.special = {token.text: token.id for token in added}
        self.special_ids = frozenset(token.id for token in added if token.special)
        self._tokens, self._first = tokens, FIRST[first]
        # what "spaces" drops are "▁"; real spaces stay
        self._shown = {id: text.replace("▁", "").encode() for text, id in (*vocab.items(), *self.special.items())
                       if first == "spaces" and isinstance(text, str) and " " in text}
        self.bos_id, self.eos_ids = bos_id, list(dict.fromkeys(eos_ids))
        self.add_bos, self.add_eos = add_bos and bos_id is not None, add_eos and bool(self.eos_ids)
        self.vocab_size = max(self._tokens, default=-1) + 1
        self.chat_template, self.names = chat_template, names or {}
        # tokens looked for in the raw text, and those looked for in the normalised text
        self._early, self._late = (_finder({t.match or t.text: t for t in added if t.normalized is late})
                                   for late in (False, True))
        self._cache: dict[str, list[int]] = {}

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
        return self._shown.get(id) or self._first(data) if first else data

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids, from its beginning. Control tokens are left out unless skip_special=False; ids that name no
        token give nothing; bytes that are not UTF-8 give U+FFFD (one for what begins a character, as Python counts)."""
        kept = [i for i in ids if not (skip_special and i in self.special_ids) and self._tokens.get(i)]
        first = [self.token_bytes(i, first=True) for i in kept[:1]]
        return b"".join([*first, *map(self.token_bytes, kept[1:])]).decode("utf-8", "replace")


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
        if start >= end:  # its place is taken (the library fails)
            continue
        if start > last:
            yield text[last:start], None
        yield "", token.id
        last = end  # of whitespace that was swallowed but is a token too, what follows that token comes again
    if last < len(text):
        yield text[last:], None


# ------------------------------------------------------------------ demo

def demo() -> None:
    """From characters to ids and back: bytes with ten merges in a list, and characters with scores."""
    merges = [(" ", "l"), ("o", "w"), (" l", "ow"), ("e", "r"), (" low", "er"), ("a", "b"), ("b", "c"), ("e", "s")]
    merges = [(left.encode(), right.encode()) for left, right in merges] + [(b"\xf0", b"\x9f"), (b"\xf0\x9f", b"\x98")]
    made = [left + right for left, right in merges]
    names = [*(bytes([b]) for b in range(256)), *reversed(made)]  # ids on purpose not in merge order
    vocab = {token: id for id, token in enumerate(names)}
    tokenizer = Tokenizer(kind="bytes", vocab=vocab, tokens=dict(enumerate(names)),
                          merges=[(vocab[left], vocab[right], vocab[left + right]) for left, right in merges])

    print("Where two families cut, with shortened regexes (no token crosses a bar):")
    for name, cut in (("GPT-2", r"'s|'ll| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
                      ("Llama 3", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+")):
        print(f"  {name:8}", " | ".join(map(repr, pretokenize("I'LL pay 12345\n\n", [compile_cut(cut)]))))

    print("\nOne piece, the first pair of the merge list first:")
    pairs, symbols = tokenizer.pairs, list(b" lower")
    while True:
        print("  ", " ".join(names[id].decode().replace(" ", "_") for id in symbols).ljust(14), symbols)
        ranked = [(*pairs.merges[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in pairs.merges]
        if not ranked:
            break
        _, id, i = min(ranked)
        symbols[i:i + 2] = [id]
    assert symbols == tokenizer.encode(" lower"), "the heap does the same"
    print(f"   'abc' -> {[names[id] for id in tokenizer.encode('abc')]}: the rank decides, not the id "
          f"(ab is {vocab[b'ab']}, bc is {vocab[b'bc']})")

    print("\nSentencePiece: characters, scores, and bytes for what the vocabulary lacks:")
    pieces = [*(f"<0x{b:02X}>" for b in range(256)), *"▁lower", "er", "low", "lo", "▁low", "▁l"]
    tokenizer = Tokenizer(
        kind="pieces", vocab={text: id for id, text in enumerate(pieces) if id > 255}, fuse=True,
        scores=[-float(id) for id in range(len(pieces))], fallback={b: b for b in range(256)}, first="space",
        normalize={"space": "▁", "prefix": "each"},
        tokens={id: bytes([id]) if id < 256 else text.replace("▁", " ").encode() for id, text in enumerate(pieces)})
    for text in ("lower", "low lower", "é"):
        ids = tokenizer.encode(text)
        print(f"   {text!r:12} -> {' '.join(pieces[id] for id in ids):28} -> {tokenizer.decode(ids)!r}")


if __name__ == "__main__":
    demo()
