"""A tokenizer's vocabulary to the files of a Hugging Face folder: tokenizer.json and tokenizer_config.json.

    files = tokenizer_files(vocabulary)     the plain dict that vocab.py returns -> {name of a file: its text}

The one idea. A tokenizer.json says with a list of merges and a few steps what the dict says with bytes, texts and ids.
Most of that is another spelling. Scores are not: SentencePiece merges whichever two neighbours make the entry with the
highest score, and a list names the pairs. They agree because of one fact. Symbols only grow, so if two neighbours l r
ever come about, no merge has crossed the borders of their stretch, and inside it went as in the text l + r alone. So an
entry is made of one pair only, the last that is left when its own text is merged alone; all its other splits
never come about. These pairs, the highest score first, are the list (`merges_of_scores`), with one for each entry where
the usual conversions list every split. tiktoken's ranks are such scores.

The ids of every text and the texts of all ids stay what they are in tokenizer.py, for the `tokenizers` library (and so
transformers and vLLM) and for vocab.py, which reads the files back; up to a BOS that is there already, which the
library writes twice. What such files cannot say is refused with a ValueError, and never written almost: equal scores
whose order matters, symbols that a dummy prefix would hide, spaces that are squeezed, tokens that decode to what no
text in the file does. What belongs elsewhere is left out: end tokens besides eos_token, which are for
generation_config.json; pad_token and other names but BOS and EOS, if they name no control token and the chat template
does not use them (the file would make them one); ids without a text, which stay holes.

Terms: an entry is a text in the model's vocabulary, which merging may reach; a symbol is an entry that it starts from,
one character. With bytes a text is written in GPT-2's printable alphabet, one character for a byte.

References: the documentation of tokenizers and of transformers; Kudo and Richardson 2018, arXiv:1808.06226.
Left out on purpose: reading (vocab.py), tokenizer.model, padding and truncation, special_tokens_map.json, which repeats
the names, and the longest text (model_max_length), which a vocabulary does not know.
"""
from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # what ByteLevel cuts by itself
DIGIT = r"\p{N}"
WORDS = "▁[^▁]*|[^▁]+"  # as Metaspace splits
DEFAULTS = {"merges": None, "scores": (), "whole": (), "unk": None, "fuse": False, "fallback": {}, "cuts": (),
            "normalize": {}, "prepare": {}, "added": (), "first": "", "bos_id": None, "eos_ids": (), "add_bos": False,
            "add_eos": False, "chat_template": None, "names": {}}
FLAGS = {"special": True, "lstrip": False, "rstrip": False, "normalized": False}  # an added token's, if it has none


def tokenizer_files(vocabulary: Mapping[str, Any]) -> dict[str, str]:
    """The files that make a folder of this vocabulary a tokenizer, name -> text.

    vocabulary: the keys are those of vocab.py's readers; kind, vocab and tokens are needed. Raises ValueError, in one
    sentence, for what the files cannot say exactly; nothing is written anywhere.
    """
    v = {**DEFAULTS, **vocabulary}
    if v["kind"] not in ("bytes", "pieces"):
        raise ValueError(f"the vocabulary's kind is {v['kind']!r}, but must be 'bytes' or 'pieces'")
    v["added"] = [{**FLAGS, **token, "match": token.get("match") or token["text"]} for token in v["added"]]
    _check_matches(v)
    model, steps = _bytes(v) if v["kind"] == "bytes" else _pieces(v)
    texts = {id: text for text, id in (*model["vocab"].items(), *((t["text"], t["id"]) for t in v["added"]))}
    added = [{"id": token["id"], "content": token["text"], "single_word": False,
              **{flag: bool(token[flag]) for flag in ("lstrip", "rstrip", "normalized", "special")}}
             for token in sorted(v["added"], key=lambda token: token["id"])]
    bos, eos = (_text_of(id, texts) if add and id is not None else None for add, id in (
        (v["add_bos"], v["bos_id"]), (v["add_eos"], next(iter(v["eos_ids"]), None))))
    data = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **steps,
            "post_processor": _adding(bos, eos, {text: id for id, text in texts.items()}), "model": model}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": bos is not None,
              "add_eos_token": eos is not None, "clean_up_tokenization_spaces": False, **_names(v, bos is not None)}
    if v["chat_template"] is not None:
        config["chat_template"] = v["chat_template"]
    files = {"tokenizer.json": json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n",
             "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2) + "\n"}
    for name, text in files.items():
        if at := re.search("[\ud800-\udfff]", text):
            raise _cannot(f"a text for {name} holds {at[0]!r}, half of a surrogate pair, which no UTF-8 file can hold")
    return files


def _cannot(why: str) -> ValueError:
    return ValueError("this vocabulary cannot be written as a tokenizer.json that gives the same ids and texts: "
                      f"{why[:300]}; keep the file that it was read from")


# ------------------------------------------------------------------ how files spell tokens

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
CODEC = codecs.charmap_build(ALPHABET)


def token_to_bytes(token: str) -> bytes | None:
    """The bytes that a vocabulary entry stands for; None if it is not written in the byte alphabet.

    >>> token_to_bytes("Ġhi"), token_to_bytes("<a b>")
    (b' hi', None)
    """
    try:
        return codecs.charmap_encode(token, "strict", CODEC)[0]
    except UnicodeEncodeError:
        return None


def bytes_to_token(data: bytes) -> str:
    """The vocabulary entry that stands for these bytes.

    >>> bytes_to_token(b" hi")
    'Ġhi'
    """
    return "".join(ALPHABET[b] for b in data)


def piece_bytes(piece: str, fallback: bool = True) -> bytes:
    r"""The bytes that a piece of SentencePiece stands for; fallback: <0xE2> is a byte.

    >>> piece_bytes("▁hi"), piece_bytes("<0xE2>")
    (b' hi', b'\xe2')
    """
    byte = fallback and re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
    return bytes.fromhex(byte[1]) if byte else _utf8(piece.replace("▁", " "))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


# ------------------------------------------------------------------ scores to merges

Rank = Callable[[str, str], float]  # of a pair of neighbours, the lowest merges first; inf: they do not merge


def last_merge(text: str, rank: Rank) -> tuple[str, str] | None:
    """The last two symbols when a text is merged alone, the best pair first and of equals the leftmost; None if it does
    not become one symbol, or is one.

    >>> order = {"ab": 2, "bc": 1, "abc": 3}
    >>> rank = lambda left, right: order.get(left + right, inf)
    >>> last_merge("abc", rank), last_merge("cab", rank)
    (('a', 'bc'), None)
    """
    parts, pair = list(text), None
    ranks = list(map(rank, parts, parts[1:]))
    while ranks:
        i = ranks.index(best := min(ranks))
        if best == inf:
            return None
        pair = parts[i], parts[i + 1]
        parts[i:i + 2] = ["".join(pair)]
        del ranks[i]
        for k in (i - 1, i):  # the new symbol has two neighbours
            if 0 <= k < len(ranks):
                ranks[k] = rank(parts[k], parts[k + 1])
    return pair


def merges_of_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merge list that does what scores do (see the top): entry -> score, to pairs in their order. An entry that
    merging never reaches has none. Parts may be characters that are no entries.

    Pairs of equal score merge from left to right, whichever they are, where a list has one of them first. Both come to
    the same if such pairs never share a symbol and what they make only merges later, at a lower score: then all those
    that are in the text at that score merge, in any order. Otherwise they are refused with a ValueError.

    >>> merges_of_scores({"a": 0.0, "b": 0.0, "c": 0.0, "ab": -2.0, "bc": -1.0, "abc": -3.0, "cc": -1.0, "aab": -4.0})
    Traceback (most recent call last):
    ValueError: 'bc' and 'cc' share the score -1.0 and the symbol 'c', so which one merges first depends on the text
    >>> merges_of_scores({"a": 0.0, "b": 0.0, "c": 0.0, "ab": -2.0, "bc": -1.0, "abc": -3.0, "aab": -4.0})
    [('b', 'c'), ('a', 'b'), ('a', 'bc'), ('a', 'ab')]
    """
    order = {text: -score for text, score in scores.items()}
    made = {text: pair for text in scores if (pair := last_merge(text, lambda l, r: order.get(l + r, inf)))}
    shared = {score for score, count in Counter(scores[text] for text in made).items() if count > 1}
    ending: dict[tuple[float, str], list[str]] = {}  # (score, symbol) -> what is made of pairs that end in the symbol
    for text, (_, right) in made.items():
        ending.setdefault((scores[text], right), []).append(text)
    for text, (left, right) in made.items():
        score = scores[text]
        if other := next((other for other in ending.get((score, left), ()) if other != text), None):
            raise ValueError(f"{other!r} and {text!r} share the score {score} and the symbol {left!r}, so which one "
                             "merges first depends on the text")
        for part in {left, right} & made.keys():
            if scores[part] in shared and score >= scores[part]:
                raise ValueError(f"{part!r} shares the score {scores[part]} with other entries and is part of {text!r} "
                                 f"of no lower score ({score}), so which one merges first depends on the text")
    return sorted(made.values(), key=lambda pair: order["".join(pair)])


# ------------------------------------------------------------------ the model

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def _bytes(v: dict) -> tuple[dict, dict]:
    """(the model, the steps around it) of a byte-level vocabulary."""
    def shown(text: str) -> bytes:
        data = token_to_bytes(text)
        return _utf8(text) if data is None else data

    spelled = {bytes_to_token(data): id for data, id in v["vocab"].items()}
    whole, missing = [bytes_to_token(data) for data in v["whole"]], set(ALPHABET) - spelled.keys()
    if v["first"]:
        raise _cannot(f"first is {v['first']!r}, which is for pieces")
    if v["merges"] is not None:
        merges = _listed(v["merges"], spelled)
    elif missing:
        raise _cannot(f"it has no list of merges, and {len(missing)} single bytes have no token")
    else:  # tiktoken takes what is an entry as it is, and merges the lowest id first
        merges, whole = _derived({text: -id for text, id in spelled.items()}), list(spelled)
    model = _model(v, spelled, merges, whole, v["unk"] if missing else None, shown,
                   reachable=lambda text: token_to_bytes(text) is not None)
    return model, {**_steps_of_bytes(v), "decoder": LEVEL}


def _pieces(v: dict) -> tuple[dict, dict]:
    """(the model, the steps around it) of a SentencePiece vocabulary."""
    vocab, fallback, unk = v["vocab"], v["fallback"], v["unk"]
    for text, id in vocab.items():
        if fallback and (byte := BYTE_TOKEN.fullmatch(text)) and fallback.get(int(byte[1], 16)) != id:
            raise _cannot(f"{text!r} has id {id}, which is not the token of that byte")
    if v["merges"] is not None:
        merges = _listed(v["merges"], vocab)
    elif 0 < len(fallback) < 256 or {unk, *fallback.values()} & set(vocab.values()):
        raise _cannot("it has no list of merges, and tokens for some of the bytes only, or such that merging makes")
    else:
        merges = _derived({text: v["scores"][id] for text, id in vocab.items()})
        unlisted = set().union(*vocab) - vocab.keys()  # characters that are part of an entry, and are none
        if pair := next((pair for pair in merges if not unlisted.isdisjoint(pair)), None):
            raise _cannot(f"{''.join(pair)!r} is made of {pair[0]!r} and {pair[1]!r}, which are not both entries")
        if unlisted and not fallback and (unk is None or not v["fuse"]):
            raise _cannot(f"{min(unlisted)!r} is part of an entry and has no token, and is dropped after merging")
    spelled = {**vocab, **{f"<0x{b:02X}>": id for b, id in fallback.items()}}
    literal = v["first"] == "spaces" or (not v["first"] and any(  # whether <0x41> is shown as these six characters
        BYTE_TOKEN.fullmatch(text) and v["tokens"].get(id) == _utf8(text) for text, id in vocab.items()))
    model = _model(v, spelled, merges, list(v["whole"]), unk, partial(piece_bytes, fallback=not literal))
    return {**model, "fuse_unk": bool(v["fuse"]), "byte_fallback": bool(fallback)}, _steps_of_pieces(v, literal)


def _listed(merges: Iterable[tuple[int, int, int]], spelled: dict[str, int]) -> list[tuple[str, str]]:
    """A list of merges, of ids, as one of texts."""
    texts = {id: text for text, id in spelled.items()}
    pairs = []
    for k, (left, right, id) in enumerate(merges):
        if not {left, right, id} <= texts.keys() or texts[left] + texts[right] != texts[id]:
            raise _cannot(f"merge {k} makes id {id} of {left} and {right}, whose texts do not make its text")
        pairs.append((texts[left], texts[right]))
    return pairs


def _derived(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    try:
        return merges_of_scores(scores)
    except ValueError as error:
        raise _cannot(str(error)) from None


def _model(v: dict, spelled: dict[str, int], merges: list[tuple[str, str]], whole: list[str], unk: int | None,
           shown: Callable[[str], bytes], reachable: Callable[[str], bool] = bool) -> dict[str, Any]:
    """The model of a tokenizer.json: its vocabulary holds what merging can reach and what decoding needs.

    spelled: entry -> id; merges and whole are in the same spelling. shown: what the decoder makes of an entry;
    reachable: whether a piece of a text can be spelled like it.
    """
    added = {token["id"]: token for token in v["added"]}
    if len(set(spelled.values())) < len(spelled) or not len(added) == len(v["added"]) == len(
            {token["text"] for token in v["added"]}):
        raise _cannot("two tokens have one id, or two added tokens one text")
    reached = {*whole, *(text for left, right in merges for text in (left, right, left + right))}
    kept, ids = {unk, *v["fallback"].values()}, set(spelled.values())
    reached |= {text for text, id in spelled.items() if len(text) == 1 or id in kept}
    entries: dict[str, int] = {}

    def put(text: str, id: int) -> None:
        """An entry that is to change nothing but the text of its id."""
        if entries.setdefault(text, id) != id:
            raise _cannot(f"{text!r} has the ids {entries[text]} and {id}")
        if text not in reached and reachable(text) and (
                len(text) == 1 or (v["fallback"] and BYTE_TOKEN.fullmatch(text))):
            raise _cannot(f"{text!r} with id {id} stands apart, but would be a symbol that merging starts from")

    for text, id in spelled.items():
        if text in reached and id in added and added[id]["text"] != text:
            raise _cannot(f"id {id} is {text!r} in the vocabulary and {added[id]['text']!r} among the added tokens")
        if text in reached or (id not in added and v["tokens"].get(id)):  # the rest are added, or fillers
            entries[text] = id
    for id, data in v["tokens"].items():
        if data and id not in added and id not in ids:  # no text leads to it
            put(data.decode("utf-8", "replace"), id)
    if unk is not None and unk not in ids:
        put(_text_of(unk, {id: token["text"] for id, token in added.items()}), unk)
    if not _numbered(added, entries):
        for id, token in added.items():
            put(token["text"], id)
    for id, text in {**{id: text for text, id in entries.items()},
                     **{id: token["match"] for id, token in added.items()}}.items():
        if shown(text) != v["tokens"].get(id):
            raise _cannot(f"id {id} stands for {v['tokens'].get(id)!r}, but {text!r} decodes to {shown(text)!r}")
    return {"type": "BPE", "dropout": None, "unk_token": next((t for t, id in entries.items() if id == unk), None),
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": _ignore_merges(whole, filter(reachable, entries), merges, set(entries)),
            "vocab": dict(sorted(entries.items(), key=lambda item: item[1])), "merges": merges}


def _numbered(added: dict[int, dict], entries: dict[str, int]) -> bool:
    """Whether the library gives added tokens that are no entries the ids that they have: it counts on from the number
    of entries, and does not read the ids in the file. Versions differ in what they do if others are beyond that."""
    others = sorted(id for id, token in added.items() if token["text"] not in entries)
    known = [entries[token["text"]] - id for id, token in added.items() if token["text"] in entries]
    return not any(known) and others == list(range(len(entries), len(entries) + len(others))) and (
        not others or all(id < len(entries) for id in added.keys() - others))


def _ignore_merges(whole: list[str], entries: Iterable[str], merges: list[tuple[str, str]], known: set[str]) -> bool:
    """Whether entries are taken as they are where one is a whole piece: all, as the library does, or none. Those that
    merging makes of their own text are both."""
    ranks = {pair: rank for rank, pair in enumerate(merges)}  # of a pair that is listed twice the last counts

    def made(text: str) -> bool:
        return len(text) == 1 or (known.issuperset(text)
                                  and last_merge(text, lambda left, right: ranks.get((left, right), inf)) is not None)

    loose = [text for text in set(entries) - set(whole) if not made(text)] if whole else []
    if loose and not all(map(made, whole)):
        raise _cannot(f"{len(whole)} entries are taken as they are, and {len(loose)} are not, {min(loose)!r} for one")
    return bool(whole) and not loose


# ------------------------------------------------------------------ the steps around it

PLAIN = {"nfc": False, "space": " ", "squeeze": False, "prefix": "never"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
UNMARK = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _steps_of_bytes(v: dict) -> dict:
    normalize, prepare = {**PLAIN, **v["normalize"]}, {**PLAIN, **v["prepare"]}
    nfc, space = normalize["nfc"], prepare["prefix"] == "always"
    if normalize != {**PLAIN, "nfc": nfc} or prepare != {**PLAIN, "nfc": nfc and prepare["nfc"],
                                                         "prefix": "always" if space else "never"}:
        raise _cannot(f"bytes with normalize={v['normalize']} and prepare={v['prepare']}, where only NFC and a space "
                      "in front are known")
    *cuts, last = v["cuts"] or [None]
    if last is not None and last != GPT2:
        cuts.append(last)
    if space and cuts:
        raise _cannot("a space is put in front, and then a regex cuts, which the library does the other way round")
    parts = [{"type": "Digits", "individual_digits": cut == DIGIT} if cut in (DIGIT, DIGIT + "+") else
             {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False} for cut in cuts]
    parts.append({**LEVEL, "add_prefix_space": space, "use_regex": last == GPT2})
    return {"normalizer": {"type": "NFC"} if nfc else None, "pre_tokenizer": _sequence(parts, "pretokenizers")}


def _steps_of_pieces(v: dict, literal: bool) -> dict:
    normalize, prepare = {**PLAIN, **v["normalize"]}, {**PLAIN, **v["prepare"]}
    marked = {**PLAIN, "space": "▁"}
    steps = next((steps for settings, steps in ((PLAIN, []), (marked, [MARK]), (
        {**marked, "prefix": "each"}, [PREPEND, MARK])) if normalize == settings), None)
    scheme = prepare["prefix"] if prepare["prefix"] in ("always", "first", "never") else None
    if steps is None or (prepare != PLAIN and prepare != {**marked, "prefix": scheme}):
        raise _cannot(f"pieces with normalize={v['normalize']} and prepare={v['prepare']}, where only marks for "
                      "spaces, with one in front of each stretch, and Metaspace are known")
    meta = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": bool(v["cuts"])}
    before = meta if prepare != PLAIN else None
    if list(v["cuts"]) not in ([], [WORDS] if before else []):
        raise _cannot(f"pieces that are cut by {v['cuts'][0]!r}")
    if not steps and not before and not v["fallback"]:
        raise _cannot("nothing would tell its pieces from bytes: no space is marked, and no byte has a token")
    if v["first"] not in ("", "space", "spaces"):
        raise _cannot(f"first is {v['first']!r}")
    parts = [*UNMARK, STRIP] if v["first"] == "space" else UNMARK
    decoder = {**meta, "prepend_scheme": "always" if v["first"] else "never", "split": True}
    return {"normalizer": _sequence(steps, "normalizers"), "pre_tokenizer": before,
            "decoder": decoder if literal else _sequence(parts, "decoders")}


def _sequence(parts: list, key: str) -> dict | None:
    return {"type": "Sequence", key: parts} if len(parts) > 1 else next(iter(parts), None)


def _check_matches(v: dict) -> None:
    """An added token is found as it is written, or (normalized) as the normalizer writes its text."""
    settings = {**PLAIN, **v["normalize"]}
    for token in v["added"]:
        match = token["text"]
        if token["normalized"]:
            match = unicodedata.normalize("NFC", match) if settings["nfc"] else match
            match = ("▁" if settings["prefix"] == "each" else "") + match.replace(" ", settings["space"])
        if match != token["match"]:
            raise _cannot(f"the added token {token['text']!r} is found as {token['match']!r}, and not as {match!r}")
    late = [token["match"] for token in v["added"] if token["normalized"]]
    if len(set(late)) < len(late):
        raise _cannot("two added tokens are found as the same text")


def _adding(bos: str | None, eos: str | None, ids: dict[str, int]) -> dict:
    """The step that adds BOS and EOS; without them it does nothing, and keeps transformers from adding its own."""
    def around(name: str, type_id: int) -> list[dict]:
        items = (("SpecialToken", bos), ("Sequence", name), ("SpecialToken", eos))
        return [{kind: {"id": id, "type_id": type_id}} for kind, id in items if id]

    return {"type": "TemplateProcessing", "single": around("A", 0), "pair": around("A", 0) + around("B", 1),
            "special_tokens": {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in (bos, eos) if text}}


def _names(v: dict, bos_added: bool) -> dict[str, str | None]:
    """The names of control tokens for tokenizer_config.json, which makes a control token of whatever it names."""
    control = {token["text"]: token["id"] for token in v["added"] if token["special"]}
    names = {key: text for key, text in v["names"].items() if text in control}
    for key in sorted(v["names"].keys() - names.keys()):
        if key in ("bos_token", "eos_token") or key in (v["chat_template"] or ""):
            raise _cannot(f"its {key} is {v['names'][key]!r}, which is no control token and would become one")
    bos, eos = control.get(names.get("bos_token")), control.get(names.get("eos_token"))
    if not bos_added and bos != v["bos_id"]:
        raise _cannot(f"its BOS has id {v['bos_id']}, and its bos_token {names.get('bos_token')!r} has id {bos}")
    if eos is not None and eos not in v["eos_ids"]:
        raise _cannot(f"its eos_token {names['eos_token']!r} has id {eos}, which is none of its ends {v['eos_ids']}")
    # Without null the classes of transformers have names of their own, and make up ids for these
    return {**dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token")), **names}


def _text_of(id: int, texts: Mapping[int, str]) -> str:
    if id not in texts:
        raise _cannot(f"id {id} is to be added or stands for what is unknown, and has no text")
    return texts[id]


# ------------------------------------------------------------------ demo

def demo() -> None:
    """Scores become merges, and a vocabulary of each kind its files; one that they cannot say is refused."""
    scores = {text: -float(k) for k, text in enumerate(["▁", "a", "b", "c", "bc", "ab", "abc", "▁abc"])}
    print("Scores:", ", ".join(f"{text} {score:.0f}" for text, score in scores.items()))
    print("Merges:", ", ".join(" + ".join(pair) for pair in merges_of_scores(scores)), "(never ab + c: bc is first)")
    ids = {text: id for id, text in enumerate(scores, 2)}
    control = {"added": [{"text": "<unk>", "id": 0}, {"text": "<s>", "id": 1}], "bos_id": 1, "add_bos": True,
               "names": {"bos_token": "<s>", "unk_token": "<unk>"}}
    pieces = {"kind": "pieces", "vocab": ids, "scores": [0.0, 0.0, *scores.values()], "unk": 0, "fuse": True,
              "normalize": {"space": "▁", "prefix": "each"}, "first": "space", **control,
              "tokens": {0: b"<unk>", 1: b"<s>", **{id: piece_bytes(text) for text, id in ids.items()}}}
    tokens = [b" ", b"a", "é".encode()[:1], "é".encode()[1:], b" a", "é".encode()]
    in_bytes = {"kind": "bytes", "vocab": {data: id for id, data in enumerate(tokens)}, "cuts": [DIGIT, GPT2],
                "merges": [(0, 1, 4), (2, 3, 5)], "tokens": {**dict(enumerate(tokens)), 6: b"<|end|>"},
                "added": [{"text": "<|end|>", "id": 6}], "eos_ids": [6], "names": {"eos_token": "<|end|>"}}
    for vocabulary in (pieces, in_bytes):
        for name, text in tokenizer_files(vocabulary).items():
            print(f"\nWhat {name} says of a vocabulary of {vocabulary['kind']}:")
            data = json.loads(text)
            for key, value in {**data.pop("model", {}), **data}.items():
                if value:
                    line = json.dumps(value, ensure_ascii=False)
                    print(f"    {key:20} {line if len(line) < 90 else f'{line[:60]} .. {line[-26:]}'}")
    try:
        tokenizer_files({**pieces, "scores": [0.0] * 10})
    except ValueError as error:
        print("\nRefused:", error)


if __name__ == "__main__":
    demo()
