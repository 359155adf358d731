"""Vocabulary files of models as one plain dict: what a tokenizer has to know, whichever file says it.

The one idea. Several kinds of files spell the same few things: which bytes or characters there are, which of them
merge, where a text is cut before, which tokens stand apart. Each reader undoes the spelling of its file (a printable
alphabet for bytes, "a b" for a merge, JSON trees of steps, protobuf); what is left is bytes, texts and ids:

    read_folder(path)        tokenizer.json with tokenizer_config.json, special_tokens_map.json and chat_template.jinja,
                             else tokenizer.model in SentencePiece's format, or in tiktoken's (Llama 3)
    read_json(data, config)  a parsed tokenizer.json of the `tokenizers` library (GPT-2, Llama 2 and 3, Qwen 2/2.5/3,
                             SmolLM2, Mistral and everything built of the same parts) and tokenizer_config.json
    read_gguf(metadata)      GGUF metadata: the keys tokenizer.ggml.* and tokenizer.chat_template

They return the same keys, all of them, which tokenizer.py takes as Tokenizer(**vocabulary):

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

Where files differ: flags of tokenizer_config.json win, and tokens that it names (eos_token and the like) are control
tokens, if they have an id; transformers 5 makes up ids for the others. With a tokenizer.json, that alone says whether
BOS and EOS are added, as in transformers 5 (add_bos_token and add_eos_token count for a tokenizer.model), and where a
SentencePiece text gets its space; there the Llama class of transformers 5 goes by `legacy` and `add_prefix_space`. With
bytes, add_prefix_space counts for the classes GPT2.. and Qwen2.., as it does there.

Files are not trusted: what is damaged, too large or not handled is refused by name, with a ValueError, and never read
wrongly. (The regexes of `cuts` are passed on as they are; tokenizer.py checks them.)

References: the documentation of tokenizers and tiktoken; sentencepiece_model.proto; the GGUF specification.
Left out on purpose: Unigram and WordPiece vocabularies, normalizers other than NFC, writing (vocab_files.py).
"""
from __future__ import annotations

import base64
import codecs
import json
import math
import re
import struct
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# Bytes of a tokenizer.json (the largest in use has 35 MB), of its small companions, of a tokenizer.model. What JSON
# makes of a hostile file, {"":0},{"":0},.., can take 30 times as much memory.
MAX_JSON, MAX_CONFIG, MAX_FILE = 48 << 20, 4 << 20, 16 << 20
MAX_PIECES, MAX_PIECE = 1 << 19, 1000  # SentencePiece's entries, and characters of one; 256,000 and 64 are in use

# Where the families cut: they differ in contractions, in digits, and in what may stick to a word or to punctuation
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" \
         r"|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
DIGIT = r"\p{N}"

# ------------------------------------------------------------------ the readers

def read_folder(path: str | Path) -> dict[str, Any]:
    """The vocabulary of a model folder; tokenizer.json counts where there are several files, tokenizer.model may be in
    original/. Raises FileNotFoundError if there is neither, ValueError for what is damaged or not handled."""
    folder = Path(path)
    small = [_json_file(folder / name, MAX_CONFIG) for name in ("special_tokens_map.json", "tokenizer_config.json")]
    config = {**_said(small[0]), **_said(small[1])}
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        config["chat_template"] = _file_bytes(jinja, MAX_CONFIG).decode("utf-8", "replace")
    if (file := folder / "tokenizer.json").is_file():
        return read_json(_json_file(file, MAX_JSON), config, source=str(file))
    for file in (folder / "tokenizer.model", folder / "original" / "tokenizer.model"):
        if file.is_file():
            with _reading(str(file)):
                data = _file_bytes(file, MAX_FILE)
                return (_from_protobuf if data[:1] == b"\n" else _from_tiktoken)(data, config)
    raise FileNotFoundError(f"{folder} has neither tokenizer.json nor tokenizer.model, so there is no tokenizer")


def read_json(data: dict, config: dict | None = None, *, source: str = "tokenizer.json") -> dict[str, Any]:
    """The vocabulary of a parsed tokenizer.json and, optionally, tokenizer_config.json (BOS, EOS, chat template)."""
    with _reading(source):
        return _from_tokenizers(data, _said(config or {}))


def read_gguf(metadata: dict) -> dict[str, Any]:
    """The vocabulary in a GGUF file's metadata (a plain dict of str, int, bool and lists)."""
    with _reading("the GGUF metadata"):
        return _from_gguf(metadata)


# ------------------------------------------------------------------ what they share

def _file_bytes(path: Path, most: int) -> bytes:
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{path} has {size} bytes, but at most {most} are read")
    return path.read_bytes()


def _said(config: dict) -> dict:
    """The settings of a configuration without those that are null, which means the same as not to be there."""
    return {key: value for key, value in config.items() if value is not None}


def _json_file(path: Path, most: int) -> dict:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(_file_bytes(path, most))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {_printable(error)}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a JSON {type(data).__name__}, not an object")
    return data


def _printable(error: Exception) -> str:
    """What an error says, in one short line that a terminal can show: it quotes what strangers wrote."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(error)[:500])[:500]


@contextmanager
def _reading(source: str) -> Iterator[None]:
    """Whatever shape untrusted data has, what comes out is one ValueError that names its source."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}: {_printable(error)}") from error
    except (TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError, struct.error) as error:
        raise ValueError(f"{source} is damaged: {type(error).__name__}: {_printable(error)}") from error


def _complete(body: dict, shown: Callable[[str], bytes]) -> dict[str, Any]:
    """All keys of a vocabulary, from those that a file gives and how its added tokens spell their bytes."""
    added = {token["text"]: {"special": True, "lstrip": False, "rstrip": False, "normalized": False,
                             "match": token["text"], **token} for token in body["added"] if token["text"]}.values()
    body = {"merges": None, "scores": [], "whole": [], "unk": None, "fuse": False, "fallback": {}, "cuts": [],
            "normalize": {}, "prepare": {}, "first": "", "add_eos": False, **body, "added": list(added),
            "tokens": {**body["tokens"], **{token["id"]: shown(token["match"]) for token in added}}}
    bos, template = body["bos_id"], body["chat_template"]
    for id in (*body["tokens"], *body["eos_ids"], *([] if bos is None else [bos])):
        if type(id) is not int or not 0 <= id < 1 << 31:
            raise ValueError(f"token id {id!r} is not an integer from 0 to 2**31 - 1")
    if not isinstance(template, str | None):
        raise ValueError(f"the chat template is a {type(template).__name__}, not a text")
    return body


# ------------------------------------------------------------------ how files spell tokens and merges

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


def piece_bytes(piece: str, fallback: bool = True) -> bytes:
    r"""The bytes that a piece of SentencePiece stands for; fallback: <0xE2> is a byte.

    >>> piece_bytes("▁hi"), piece_bytes("<0xE2>")
    (b' hi', b'\xe2')
    """
    byte = fallback and re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
    return bytes.fromhex(byte[1]) if byte else _utf8(piece.replace("▁", " "))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def merge_ids(vocab: dict[str, int], merges: Iterable) -> list[tuple[int, int, int]]:
    """Merges, "a b" or ["a", "b"], as (left id, right id, id of what they make). Only a pair can hold a token with a
    space in it; a "#version" line is no merge.

    >>> merge_ids({"a": 0, "b": 1, "ab": 2, " ": 3, "a ": 4}, ["#version: 0.2", "a b", ["a", " "]])
    [(0, 1, 2), (0, 3, 4)]
    """
    made = []
    for merge in merges:
        if isinstance(merge, str) and merge.startswith("#version"):
            continue
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if len(pair) != 2 or not all(pair):
            raise ValueError(f"merge {merge!r} is not two tokens")
        left, right = pair
        try:
            id = vocab[left + right]
            made.append((vocab[left], vocab[right], id))
        except KeyError as error:
            raise ValueError(f"merge {len(made)} ({left!r}, {right!r}) needs {error} in the vocabulary") from None
    return made


def _byte_level(vocab: dict[str, int], merges: Iterable, whole: Iterable[str], unk: int | None = None) -> dict:
    """The merging part of a byte-level vocabulary, from texts in the byte alphabet."""
    spelled = {token: token_to_bytes(token) for token in vocab}
    return {"kind": "bytes", "vocab": {data: vocab[token] for token, data in spelled.items() if data}, "unk": unk,
            "merges": merge_ids(vocab, merges), "whole": [spelled[token] for token in whole if spelled[token]],
            "tokens": {vocab[token]: data or _utf8(token) for token, data in spelled.items()}}


# ------------------------------------------------------------------ tokenizer.json

# The steps that a tokenizer.json has of SentencePiece's ways
PREPEND = [{"type": "Prepend", "prepend": "▁"}]
MARK = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
UNMARK = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
STRIP = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]


def _from_tokenizers(data: dict, config: dict) -> dict[str, Any]:
    model, vocab = data["model"], data["model"]["vocab"]
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise ValueError(f"the model type {model.get('type')!r} is not BPE, the only one that is read")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):  # dropout: ids at random, for training
        if model.get(key):
            raise ValueError(f"the model's {key}={model[key]!r} is not handled; null is")
    if not all(type(id) is int for id in vocab.values()) or len(set(vocab.values())) != len(vocab):
        raise ValueError("the vocabulary does not give each token an integer id of its own")
    steps, before, after = (_flat(data.get(key), f"{key.replace('_', '')}s")
                            for key in ("normalizer", "pre_tokenizer", "decoder"))
    if model.get("byte_fallback") or {"Metaspace", "Prepend", "Replace"} & {part["type"] for part in before + steps}:
        body, shown = _json_pieces(model, steps, before, after)
    else:
        body, shown = _json_bytes(model, steps, _prefixed(before, config)), _utf8
    added = _added_tokens(data, config, vocab, body["normalize"])
    ids = {**vocab, **{token["text"]: token["id"] for token in added}}
    if len(set(ids.values())) != len(ids):
        raise ValueError("an added token has the id of another token")
    named, (bos, eos) = _named(config, ids), _template(data.get("post_processor"))
    # As in transformers 5, which drops add_bos_token and add_eos_token where there is a tokenizer.json
    named["add_bos"], named["add_eos"] = bos is not None, eos is not None
    named["bos_id"] = named["bos_id"] if bos is None else ids[bos]
    named["eos_ids"] = ([] if eos is None else [ids[eos]]) + named["eos_ids"]
    return _complete({**body, **named, "added": added}, shown)


def _json_bytes(model: dict, steps: list[dict], before: list[dict]) -> dict[str, Any]:
    """The byte-level parts of a tokenizer.json."""
    vocab, unk, names = model["vocab"], model.get("unk_token"), [step["type"] for step in steps]
    if set(names) - {"NFC"}:
        raise ValueError(f"the normalizer {'+'.join(names)} is not handled, only NFC, and what SentencePiece needs")
    if unk is not None and set(ALPHABET) - set(vocab) and (model.get("fuse_unk") or unk not in vocab):
        raise ValueError(f"bytes without a token together with unk_token={unk!r} and fuse_unk are not handled")
    cuts, space = _pre_tokenizer(before)
    body = _byte_level(vocab, model["merges"], vocab if model.get("ignore_merges") else (), vocab.get(unk))
    again = {"nfc": True} if steps else {}  # what `restore` puts back may compose with the next character
    return {**body, "cuts": cuts, "normalize": again, "prepare": {**again, "prefix": "always"} if space else again}


def _json_pieces(model: dict, steps: list[dict], before: list[dict], after: list[dict]
                 ) -> tuple[dict[str, Any], Callable[[str], bytes]]:
    """The parts of a tokenizer.json that comes from SentencePiece, and how its pieces spell bytes. The space in front
    is put there by a normalizer ("legacy"), or by the pre-tokenizer Metaspace."""
    def refuse(what: str, parts: list[dict]) -> ValueError:
        return ValueError(f"the {what} {json.dumps(parts)[:200]} is not handled in a SentencePiece vocabulary")

    vocab, unk, spelled = model["vocab"], model.get("unk_token"), {}
    if unk is not None and unk not in vocab:
        raise ValueError(f"the unk_token {unk!r} is not in the vocabulary")
    if model.get("byte_fallback"):
        spelled = {b: vocab[text] for b in range(256) if (text := f"<0x{b:02X}>") in vocab}
    if steps not in ([], MARK, PREPEND + MARK):
        raise refuse("normalizer", steps)
    normalize = {"space": "▁", "prefix": "never" if steps == MARK else "each"} if steps else {}
    if before and not (scheme := _scheme(before)):
        raise refuse("pre-tokenizer", before)
    prepare = {"space": "▁", "prefix": scheme} if before else {}
    if after in (UNMARK, UNMARK + STRIP):
        first, fallback = "" if after == UNMARK else "space", True
    elif scheme := _scheme(after):  # drops each "▁" of the first token, spells no bytes
        first, fallback = "" if scheme == "never" else "spaces", False
    else:
        raise refuse("decoder", after)
    shown = partial(piece_bytes, fallback=fallback)
    return {"kind": "pieces", "vocab": vocab, "merges": merge_ids(vocab, model["merges"]), "unk": vocab.get(unk),
            "whole": list(vocab) if model.get("ignore_merges") else [], "fuse": bool(model.get("fuse_unk")),
            "fallback": spelled, "normalize": normalize, "prepare": prepare, "first": first,
            "cuts": ["▁[^▁]*|[^▁]+"] if before and before[0].get("split", True) else [],
            "tokens": {id: shown(text) for text, id in vocab.items()}}, shown


def _scheme(parts: list[dict]) -> str | None:
    """Where a lone Metaspace step puts a space in front; None if it is another step."""
    if [(part.get("type"), part.get("replacement")) for part in parts] != [("Metaspace", "▁")]:
        return None
    scheme = parts[0].get("prepend_scheme") or ("never" if parts[0].get("add_prefix_space") is False else "always")
    return {"always": "always", "first": "first", "never": "never"}[scheme]


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


def _prefixed(before: list[dict], config: dict) -> list[dict]:
    """A byte-level pre-tokenizer with the add_prefix_space of tokenizer_config.json, where its class heeds that."""
    said = config.get("add_prefix_space")
    if not isinstance(said, bool) or not str(config.get("tokenizer_class")).startswith(("GPT2", "Qwen2")):
        return before
    return [{**part, "add_prefix_space": said} if part["type"] == "ByteLevel" else part for part in before]


def _template(node: dict | None) -> tuple[str | None, str | None]:
    """(the token that a post-processor puts in front of a text, the one that it puts behind)"""
    bos = eos = None
    for part in _flat(node, "processors"):
        if part["type"] == "ByteLevel":
            continue
        items = part["single"] if part["type"] == "TemplateProcessing" else []
        ids = [None if "Sequence" in item else item["SpecialToken"]["id"] for item in items]
        match ids:
            case [None] | [str(), None] | [None, str()] | [str(), None, str()]:
                bos = bos if ids[0] is None else ids[0]
                eos = eos if ids[-1] is None else ids[-1]
            case _:
                raise ValueError(f"the post-processor {json.dumps(part)[:200]} is not handled")
    return bos, eos


# By these keys tokenizer_config.json names control tokens; a list makes one of what is no added token yet
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
EXTRA = ("additional_special_tokens", "extra_special_tokens")


def _name(token: Any) -> str | None:
    """The text of a token that tokenizer_config.json names: as such, or as the content of an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _added_tokens(data: dict, config: dict, vocab: dict[str, int], normalize: dict | None = None) -> list[dict]:
    """The added tokens of tokenizer.json and tokenizer_config.json, whose flags win, and the tokens of the vocabulary
    that tokenizer_config.json names as BOS, EOS and the like: they are control tokens. Names without an id are left
    out (transformers gives them ids that the model does not know)."""
    def normalized(text: str) -> str:  # as the library looks for it: with a dummy prefix of its own
        text = unicodedata.normalize("NFC", text) if normalize.get("nfc") else text
        text = text.replace(" ", normalize.get("space", " "))
        return "▁" + text if text and normalize.get("prefix") == "each" else text

    entries: dict[str, dict] = {}
    for entry in data.get("added_tokens") or []:
        entries.setdefault(entry["content"], entry)
    for id, entry in config.get("added_tokens_decoder", {}).items():
        text, id = entry["content"], int(id)
        if (other := entries.get(text, {}).get("id", id)) != id:
            raise ValueError(f"the added token {text!r} has id {id} in tokenizer_config.json, and {other} elsewhere")
        entries[text] = {**entry, "id": id}
    for key in (*NAMES, *EXTRA):
        for name in named if isinstance(named := config.get(key), list) else [named]:
            text = _name(name)
            if text in entries and key in NAMES:
                entries[text] = {"normalized": not entries[text].get("special"), **entries[text], "special": True}
            elif text in vocab and text not in entries:
                entries[text] = {**(name if isinstance(name, dict) else {}), "id": vocab[text], "special": True}
    added = []
    for text, entry in entries.items():
        if vocab.get(text, id := entry["id"]) != id:
            raise ValueError(f"the added token {text!r} has id {id}, and {vocab[text]} in the vocabulary")
        if entry.get("single_word"):
            raise ValueError(f"the added token {text!r} has single_word set, which is not handled")
        flags = {key: bool(entry.get(key)) for key in ("special", "lstrip", "rstrip")}
        late = normalize is not None and bool(entry.get("normalized", not flags["special"]))
        added.append({"text": text, "id": id, "match": normalized(text) if late else text, "normalized": late, **flags})
    return added


def _named(config: dict, special: dict[str, int]) -> dict[str, Any]:
    """The keys that tokenizer_config.json gives; of several chat templates the one named "default" counts."""
    names = {key: name for key in NAMES if (name := _name(config.get(key))) is not None}
    template, eos = config.get("chat_template"), names.get("eos_token")
    if isinstance(template, list):
        template = next((item["template"] for item in template if item["name"] == "default"), None)
    return {"names": names, "chat_template": template, "bos_id": special.get(names.get("bos_token", "")),
            "eos_ids": [special[eos]] if eos in special else []}


# ------------------------------------------------------------------ tokenizer.model

def _from_tiktoken(data: bytes, config: dict) -> dict[str, Any]:
    """Llama 3's: lines of base64 and rank = id; 256 control tokens follow."""
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
    special = {f"<|{name}|>": n + i for i, name in enumerate(names)}
    named = _named({"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", **config}, special)
    return _complete({"kind": "bytes", "vocab": ranks, "tokens": {id: token for token, id in ranks.items()},
                      "added": [{"text": text, "id": id} for text, id in special.items()], "cuts": [LLAMA3],
                      "add_bos": True, **named}, _utf8)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(the number that begins there, where it ends)"""
    number = shift = 0
    for byte in data[at:at + 10]:
        number, shift = number | (byte & 127) << shift, shift + 7
        if byte < 128:
            return number, at + shift // 7
    raise ValueError("a number in a protobuf message does not end")


def _message(data: bytes, budget: Iterator) -> dict[int, list[Any]]:
    r"""The fields of a protobuf message, number -> values in order: integers, and bytes for all the rest. Each takes
    one item of the budget.

    >>> _message(b"\x08\x96\x01" b"\x12\x02hi", iter(range(9)))
    {1: [150], 2: [b'hi']}
    """
    fields: dict[int, list[Any]] = {}
    at = count = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire not in (0, 1, 2, 5):
            raise ValueError(f"a protobuf message has a field of the unknown kind {wire}")
        value, end = _varint(data, at) if wire in (0, 2) else ((8 if wire == 1 else 4), at)
        if wire:
            at, end = end, end + value
            if end > len(data):
                raise ValueError(f"a protobuf field of {value} bytes reaches beyond the end of its message")
            value = data[at:end]
        at, count = end, count + 1
        fields.setdefault(number, []).append(value)
        if count > MAX_PIECES + 64 or len(fields) > 64 or next(budget, None) is None:
            raise ValueError(f"a SentencePiece model has up to {MAX_PIECES} pieces and not so many fields")
    return fields


def _from_protobuf(data: bytes, config: dict) -> dict[str, Any]:
    """SentencePiece's (sentencepiece_model.proto), by way of GGUF's names."""
    def last(message: dict, key: int, default: Any = None) -> Any:
        return message.get(key, [default])[-1]

    if len(data) > MAX_FILE:
        raise ValueError(f"{len(data)} bytes are no SentencePiece model; up to {MAX_FILE} are read")
    budget = iter(range(4 * MAX_PIECES))  # fields in all; a piece has three, and is one of the model's
    model = _message(data, budget)
    trainer, normalizer, denormalizer = (_message(b"".join(model.get(key, ())), budget) for key in (2, 3, 5))
    if (kind := last(trainer, 3, 1)) != 2:
        kind = {1: "Unigram", 3: "word", 4: "char"}.get(kind, kind)
        raise ValueError(f"the SentencePiece model is of type {kind}, not BPE, the only one that is read")
    for refused, name in ((last(normalizer, 2) or last(denormalizer, 2), "a precompiled_charsmap"),
                          (not last(normalizer, 5, 1), "escape_whitespaces=false"),
                          (last(trainer, 24), "treat_whitespace_as_suffix")):
        if refused:
            raise ValueError(f"the SentencePiece model has {name}, which is not handled")
    pieces = [_message(piece, budget) for piece in model.get(1, ())]
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
        "add_bos_token": config.get("add_bos_token"), "add_eos_token": config.get("add_eos_token")}.items()})
    added, more = {token["id"]: token for token in body["added"]}, _added_tokens({}, config, ids)
    for token in more:
        own = {"special": True, **added[token["id"]]} if token["text"] in ids and token["id"] in added else {}
        added[token["id"]] = {**token, **own, "lstrip": token["lstrip"], "rstrip": token["rstrip"],
                              "special": token["special"] or own.get("special", False)}
    named = _named({**body["names"], **config}, {**ids, **{token["text"]: token["id"] for token in more}})
    if config.get("legacy") is False and last(normalizer, 3, 1):  # as transformers reads it
        body["normalize"]["prefix"] = "once"
    return _complete({**body, **named, "added": added.values()}, partial(piece_bytes, fallback=False))


# ------------------------------------------------------------------ GGUF

# tokenizer.ggml.pre -> the cuts, one after the other; the names of a row share their regexes in llama.cpp's llama-vocab
GGUF_PRE = {
    **dict.fromkeys(("gpt-2", "olmo"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), (DIGIT, GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (QWEN2,)),
}
GGUF_LIKE_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3")  # takes whole pieces; BOS unless the file says no


def _from_gguf(metadata: dict) -> dict[str, Any]:
    """The vocabulary in GGUF metadata."""
    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    texts, model, pre = get("tokens"), get("model"), get("pre")
    if model not in ("gpt2", "llama"):
        raise ValueError(f"the tokenizer model {model!r} is not read, only BPE: 'gpt2' and SentencePiece's 'llama'")
    if not texts or set(map(type, texts)) != {str}:
        raise ValueError("tokenizer.ggml.tokens (texts) is needed")
    named = {name: id for name in ("bos", "eos", "eot", "eom", "padding", "unknown")
             if (id := get(f"{name}_token_id")) is not None}
    for name, id in named.items():
        if type(id) is not int or not 0 <= id < len(texts):
            raise ValueError(f"tokenizer.ggml.{name}_token_id is {id!r}, not an id of the {len(texts)} tokens")
    kinds = get("token_type") or [3 if i in named.values() and i != named.get("padding") else 1
                                  for i in range(len(texts))]
    if len(kinds) != len(texts):
        raise ValueError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(texts)} tokens")
    usual = (("unknown", 0, 2), ("bos", 1, 3), ("eos", 2, 3)) if model == "llama" else ()  # name, id, kind
    named |= {name: id for name, id, kind in usual if f"tokenizer.ggml.{name}_token_id" not in metadata
              and id < len(kinds) and kinds[id] == kind}
    ends = [named[name] for name in ("eos", "eot", "eom") if name in named]
    if model == "llama":
        body, shown = _gguf_pieces(texts, kinds, get), partial(piece_bytes, fallback=False)
    else:
        body, shown = _gguf_bytes(texts, kinds, get("merges"), pre), _utf8
    names = (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown"))
    add_bos, add_eos = (said if isinstance(said := get(f"add_{name}_token"), bool) else default for name, default in (
        ("bos", model == "llama" or pre in GGUF_LIKE_LLAMA3), ("eos", False)))
    return _complete({**body, "eos_ids": ends, "bos_id": named.get("bos"), "add_bos": add_bos, "add_eos": add_eos,
                      "chat_template": metadata.get("tokenizer.chat_template"),
                      "names": {key: texts[named[name]] for key, name in names if name in named}}, shown)


def _gguf_bytes(texts: list[str], kinds: Sequence[int], merges: Iterable, pre: str) -> dict[str, Any]:
    if pre not in GGUF_PRE:
        raise ValueError(f"the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not one of {', '.join(GGUF_PRE)}")
    if merges is None:
        raise ValueError("tokenizer.ggml.merges is needed")
    vocab = {text: i for i, text in enumerate(texts)}
    whole = [text for text, kind in zip(texts, kinds) if kind == 1] if pre in GGUF_LIKE_LLAMA3 else ()
    body = _byte_level(vocab, merges, whole)
    again = {"nfc": True} if pre == "qwen2" else {}  # llama.cpp has none; the library, with Qwen's tokenizer.json, does
    return {**body, "cuts": list(GGUF_PRE[pre]), "normalize": again, "prepare": again,
            "tokens": {i: b"" if kinds[i] == 5 else body["tokens"][vocab[t]] for i, t in enumerate(texts)},  # 5: filler
            "added": [{"text": texts[i], "id": i, "special": k != 4} for i, k in enumerate(kinds) if k in (2, 3, 4)]}


def _gguf_pieces(texts: list[str], kinds: Sequence[int], get: Callable) -> dict[str, Any]:
    """SentencePiece's vocabulary. Each stretch of text between control tokens is a text of its own, as in llama.cpp."""
    scores, n = get("scores"), len(texts)
    if scores is None or get("token_type") is None or get("precompiled_charsmap"):
        raise ValueError("a SentencePiece vocabulary needs scores and token_type, and no precompiled_charsmap")
    if len(scores) != n:
        raise ValueError(f"tokenizer.ggml.scores has {len(scores)} scores for {n} tokens")
    for text, score in zip(texts, scores):
        if type(score) is not float or not math.isfinite(score):
            raise ValueError(f"the score {score!r} of piece {text!r} is not a finite float")
    if twice := next((text for text, count in Counter(texts).items() if count > 1), None):
        raise ValueError(f"the piece {twice!r} is there twice, so its id is not clear")
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
    added = [{"text": text, "id": id} for text, id in (unknown | control).items()]
    added += [{"text": text.replace("▁", " "), "id": id, "special": False, "normalized": True, "match": text}
              for text, id in symbols.items()]  # they take no part in merges, which is as if found late
    dummy, squeeze = bool(get("add_space_prefix", True)), bool(get("remove_extra_whitespaces"))
    return {"kind": "pieces", "vocab": normal, "scores": list(scores), "unk": next(iter(unknown.values()), None),
            "fuse": True, "fallback": {data[0]: id for data, id in values.items()}, "added": added,
            "normalize": {"space": "▁", "squeeze": squeeze, "prefix": "each" if dummy else "never"},
            "tokens": {i: b"" if kinds[i] == 5 else piece_bytes(text, kinds[i] == 6) for i, text in enumerate(texts)},
            "first": "space" if dummy or squeeze else ""}


# ------------------------------------------------------------------ demo

def demo() -> None:
    """The same three tokens as a tokenizer.json and two kinds of GGUF files write them, and what becomes of them."""
    print("Files write bytes as printable characters:", "".join(ALPHABET[b] for b in " \n\té€".encode()))
    model = {"type": "BPE", "vocab": {c: i for i, c in enumerate([*ALPHABET, "ab", "Ġab"])}, "merges": ["a b", "Ġ ab"]}
    in_bytes = {"model": "gpt2", "pre": "qwen2", "tokens": list(model["vocab"]), "merges": model["merges"]}
    in_pieces = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", *"▁ab", "ab", "▁ab"], "token_type": [2, 3, 3] +
                 [1] * 5, "scores": [0.0, 0.0, 0.0, -5.0, -4.0, -3.0, -2.0, -1.0]}
    metadata = [{f"tokenizer.ggml.{key}": value for key, value in data.items()} for data in (in_bytes, in_pieces)]
    for name, vocabulary in (("tokenizer.json", read_json({"model": model, "pre_tokenizer": {"type": "ByteLevel"}})),
                             ("GGUF, bytes", read_gguf(metadata[0])), ("GGUF, pieces", read_gguf(metadata[1]))):
        print(f"\n{name}:")
        for key, text in ((key, str(value)) for key, value in vocabulary.items() if value):
            print(f"    {key:10} {text if len(text) < 90 else f'{text[:40]} .. {text[-40:]}'}")
    try:
        read_json({"model": {**model, "type": "Unigram"}})
    except ValueError as error:
        print(f"\nRefused by name: {error}")


if __name__ == "__main__":
    demo()
