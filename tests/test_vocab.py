"""vocab.py: every way to spell a vocabulary becomes the same plain data; what is not handled is refused by name."""
import base64
import inspect
import itertools
import json
import random
import re
import tracemalloc
from pathlib import Path

import pytest
from test_tokenizer import (
    AS_IS,
    BPE_MODEL,
    BYTES,
    CHATML,
    FAMILIES,
    FORMS,
    HARD,
    bos_tokenizer,
    corpus,
    field,
    from_folder,
    from_gguf,
    from_json,
    library,
    llama2,
    ours,
    proto,
    template_of,
    toy,
    varint,
)
from tokenizers import pre_tokenizers

import tokenizer as T
import vocab as V
from chat import ChatTemplate
from tokenizer import Tokenizer
from vocab import LLAMA3

# ------------------------------------------------------------------ spelling

def test_tk_14_the_byte_alphabet():
    """TK-14 (paiml/aprender #2121): 68 bytes are remapped to U+0100..U+0143, 0xAD among them, and nothing collides."""
    a = V.byte_alphabet()
    assert [ord(a[b]) for b in (0x00, 0x0A, 0x20, 0x7F, 0x80, 0xA0, 0xAD, 0xFF)] == [
        0x100, 0x10A, 0x120, 0x121, 0x122, 0x142, 0x143, 0xFF]
    assert len(set(a)) == 256 and sum(ord(c) >= 0x100 for c in a) == 68 and max(map(ord, a)) == 0x143
    assert set(a) == set(pre_tokenizers.ByteLevel.alphabet())
    assert [V.token_to_bytes(c) for c in a] == [bytes([b]) for b in range(256)]
    tok = toy()
    assert tok.encode("季") == [0xE5, 0xAD, 0xA3] and tok.decode([0xE5, 0xAD, 0xA3]) == "季"
    assert [tok.token_bytes(b) for b in range(256)] == [bytes([b]) for b in range(256)]


def test_tk_09_merges_as_strings_or_as_pairs():
    """TK-09 (huggingface/swift-transformers #131): "a b" and ["a", "b"] are one merge, a token with a space fits a pair
    only, and a #version line is none."""
    vocab = {**{c: i for i, c in enumerate(V.ALPHABET)}, "ab": 256, "c d": 257, "c": 99, " ": 258, " d": 259}
    data = json.loads(library({c: i for i, c in enumerate(V.ALPHABET)}, []).to_str())

    def ids(merges):
        return from_json({**data, "model": {**data["model"], "vocab": vocab,
                                                      "merges": merges}}).encode("abcd")

    assert ids(["#version: 0.2", "a b"]) == ids([["a", "b"], ["c", " d"]]) == ids(["a b"]) == [256, 99, 100]
    for bad in ("a b c", "ab", "a ", " b", "", ["a"], ["a", "b", "c"], ["a", 5], 7, None, {"a": "b"}):
        with pytest.raises(ValueError, match=r"merge|damaged"):
            ids([bad])
    with pytest.raises(ValueError, match="'zz' in the vocabulary"):
        ids([["z", "z"]])


# ------------------------------------------------------------------ tokenizer.json

def tree(**changes) -> dict:
    vocab = {c: i for i, c in enumerate([*V.ALPHABET, "ab"])}
    data = json.loads(library(vocab, [("a", "b")], "llama3", ["<|e|>"]).to_str())
    for path, value in changes.items():
        node, *keys = data, *path.split("__")
        for key in keys[:-1]:
            node = node[int(key) if isinstance(node, list) else key]
        node[int(keys[-1]) if isinstance(node, list) else keys[-1]] = value
    return data


@pytest.mark.parametrize("changes, word", [
    ({"model__byte_fallback": True}, "SentencePiece"), ({"model__dropout": 0.1}, "dropout=0.1"),
    ({"model__type": "Unigram"}, "Unigram"),
    ({"model__type": "WordPiece"}, "WordPiece"), ({"model__continuing_subword_prefix": "##"},
                                                  "continuing_subword_prefix"),
    ({"model__end_of_word_suffix": "</w>"}, "end_of_word_suffix"), ({"normalizer": {"type": "NFKC"}}, "NFKC"),
    ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}}, "Lowercase"),
    ({"pre_tokenizer": {"type": "Metaspace"}}, "SentencePiece"), ({"pre_tokenizer": {"type": "Whitespace"}},
                                                                  "Whitespace"),
    ({"pre_tokenizer": None}, "None"), ({"pre_tokenizer__pretokenizers": []}, "None"),
    ({"pre_tokenizer__pretokenizers": [{"type": "Punctuation"}, {"type": "ByteLevel"}]}, "Punctuation"),
    ({"pre_tokenizer__pretokenizers": [{"type": "ByteLevel"}, {"type": "ByteLevel"}]}, "ByteLevel"),
    ({"pre_tokenizer__pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel", "add_prefix_space": True}]},
     "add_prefix_space"),
    ({"pre_tokenizer__pretokenizers__0": 5}, "damaged"),
    ({"post_processor": {"type": "BertProcessing"}}, "BertProcessing"),
    ({"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {}},
        {"SpecialToken": {"id": "<|e|>"}}, {"SpecialToken": {"id": "<|e|>"}}]}}, "<|e|>"),
    ({"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": ""}}, {"Sequence": {}}]}},
     "damaged"),
    ({"added_tokens": [{"id": 5, "content": "ab"}]}, "'ab'"), ({"added_tokens": [{"id": 5, "content": "<x>"}]},
                                                               "another token"),
    ({"added_tokens": [{"id": 300, "content": "<x>", "single_word": True}]}, "single_word"),
    ({"added_tokens": [{"id": -1, "content": "<x>"}]}, "-1"), ({"added_tokens": [{"id": 2**40, "content": "<x>"}]},
                                                               "2**31"),
    ({"added_tokens": [{"id": True, "content": "<x>"}]}, "another token"),
    ({"added_tokens": [{"id": "9", "content": "<x>"}]}, "'9'"), ({"added_tokens": [{"content": "<x>"}]}, "damaged"),
    ({"model__vocab": {"a": 0, "b": 0}}, "integer id"), ({"model__vocab": {"a": 0.5}}, "integer id"),
    ({"model__vocab": [["a", 0.5]]}, "damaged"), ({"model": None}, "damaged"),
])
def test_a_tokenizer_json_that_is_not_handled_is_refused_by_name(changes, word):
    from_json(tree())
    with pytest.raises(ValueError, match=re.escape(word)):
        from_json(tree(**changes))


@pytest.mark.parametrize("split", [{"behavior": "Removed"}, {"behavior": "MergedWithPrevious"}, {"invert": True},
                                   {"pattern": {"String": " "}}])
def test_splits_that_are_not_isolated_are_refused(split):
    part = {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": False, **split}
    with pytest.raises(ValueError, match="Split"):
        from_json(tree(pre_tokenizer__pretokenizers=[part, {"type": "ByteLevel", "use_regex": False}]))


def test_missing_bytes_with_fused_unknowns_are_refused():
    vocab = {c: i for i, c in enumerate(V.ALPHABET) if c != "!"} | {"?": 63}
    with pytest.raises(ValueError, match="fuse_unk"):
        ours(library(vocab, [], unk_token="?", fuse_unk=True))


@pytest.mark.parametrize("dropout", [None, 0, 0.0])
def test_no_dropout_is_no_dropout(dropout):
    assert from_json(tree(model__dropout=dropout)).encode("ab") == [256]


@pytest.mark.parametrize("front, back", [("<s>", None), (None, "</s>"), ("<s>", "</s>"), (None, None)])
def test_bos_and_eos_by_the_post_processor(front, back):
    tok, theirs = llama2(template_of(front, back))
    assert tok.encode("the cat") == theirs.encode("the cat").ids
    assert tok.encode("the cat", bos=True) == [1, *tok.encode("the cat", bos=False)]
    assert 2 not in tok.encode("the cat", allow_special=True), "a chat prompt is to be continued"
    other, _ = llama2(template_of(front, back), add_bos_token=not front, add_eos_token=not back)
    assert (other.add_bos, other.add_eos) == (bool(front), bool(back)), "such flags are for a tokenizer.model"


@pytest.mark.parametrize("template", [5, {"a": "b"}, ["x"], True])
def test_a_chat_template_that_is_no_text_is_refused(template):
    with pytest.raises(ValueError, match=r"chat template|damaged"):
        toy(config={"chat_template": template})


# ------------------------------------------------------------------ GGUF

def small_gguf(**changes) -> dict:
    data = {"model": "gpt2", "pre": "llama-bpe",
            "tokens": [*V.ALPHABET, "ab", "<s>", "</s>", "<|eot|>", "<|eom|>", "<think>", "[PAD]"], "merges": ["a b"],
            "token_type": [1] * 257 + [3, 3, 3, 3, 4, 5], "bos_token_id": 257, "eos_token_id": 258,
            "eot_token_id": 259, "eom_token_id": 260, **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in data.items() if value is not None}


def test_gguf_metadata():
    tok = from_gguf(small_gguf())
    assert tok.add_bos and tok.vocab_size == 263 and tok.encode("ab 123") == [257, 256, 32, 49, 50, 51]
    assert tok.special == {"<s>": 257, "</s>": 258, "<|eot|>": 259, "<|eom|>": 260, "<think>": 261}
    assert tok.decode([257, 97, 258, 261, 262, 98]) == "a<think>b"  # <think> is added but not special; 262 is no token
    assert not from_gguf(small_gguf(add_bos_token=False)).add_bos
    untyped = from_gguf(small_gguf(token_type=None))
    assert untyped.special == {"<s>": 257, "</s>": 258, "<|eot|>": 259, "<|eom|>": 260}
    qwen = from_gguf(small_gguf(pre="qwen2"))
    assert not qwen.add_bos and qwen.encode("e\u0301") == [*"é".encode()]


@pytest.mark.parametrize("changes, word", [
    ({"model": "llama"}, "SentencePiece"), ({"model": "t5"}, "t5"), ({"model": None}, "None"), ({"pre": "tekken"},
                                                                                                "tekken"),
    ({"pre": None}, "None"), ({"pre": "default"}, "default"), ({"tokens": None}, "tokens"), ({"tokens": []}, "tokens"),
    ({"merges": None}, "merges"), ({"merges": ["a"]}, "merge"), ({"merges": ["a q"]}, "'aq'"), ({"merges": 5},
                                                                                                "damaged"),
    ({"token_type": [1]}, "1 entries"), ({"eos_token_id": 999}, "999"), ({"bos_token_id": -1}, "-1"),
    ({"eos_token_id": "x"}, "'x', not an id"), ({"tokens": [1, 2]}, "tokens"), ({"pre": ["x"]}, "damaged"),
])
def test_gguf_metadata_that_is_not_handled_is_refused_by_name(changes, word):
    with pytest.raises(ValueError, match=re.escape(word)):
        from_gguf(small_gguf(**changes))


def test_names_that_share_a_regex_share_it():
    assert V.GGUF_PRE["smollm"] == tuple(FAMILIES["smollm2"]) and V.GGUF_PRE["llama-bpe"] == (LLAMA3,)
    assert set(V.GGUF_LIKE_LLAMA3) <= set(V.GGUF_PRE)


def test_d05_all_end_tokens_of_the_metadata_are_known():
    """D05 (vllm-project/vllm #4180): a tokenizer may name several end tokens."""
    assert from_gguf(small_gguf()).eos_ids == [258, 259, 260]
    assert from_gguf(small_gguf(eot_token_id=258, eom_token_id=None)).eos_ids == [258]
    assert bos_tokenizer().eos_ids == [258] and toy().eos_ids == []


def test_tk_13_bos_where_the_files_say_so(smol):
    """TK-13 (vllm-project/vllm #27486): one BOS for Llama 3, none for SmolLM2 and Qwen2."""
    assert bos_tokenizer().add_bos and not toy(config={"bos_token": "<|im_start|>", "add_bos_token": True}).add_bos
    assert not smol.add_bos and smol.bos_id == 1 and smol.encode("hi") == smol.encode("hi", bos=False)
    plain = toy()
    assert plain.bos_id is None and not plain.add_bos
    with pytest.raises(ValueError, match="no BOS"):
        plain.encode("hi", bos=True)
    assert bos_tokenizer().encode("a") == [256, 97]


def sp_metadata(**changes) -> dict:
    texts = ["<unk>", "<s>", "</s>", *BYTES, "<sep>", "[PAD]", "b", "a", "▁", "é" * 9, "ab", "▁a", "▁ab"]
    data = {"model": "llama", "tokens": texts, "scores": [-float(i) for i in range(268)],
            "token_type": [2, 3, 3] + [6] * 256 + [4, 5] + [1] * 7, **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in data.items() if value is not None}


@pytest.mark.parametrize("changes, word", [
    ({"scores": None}, "scores"), ({"token_type": None}, "token_type"), ({"scores": [0.0]}, "1 scores"),
    ({"precompiled_charsmap": [1]}, "precompiled_charsmap"), ({"scores": [None] * 268}, "finite"),
    ({"scores": [float("inf")] * 268}, "finite"), ({"scores": 5}, "damaged"), ({"token_type": [7] * 268}, "types"),
    ({"scores": [0] * 268}, "score 0 of piece '<unk>'"), ({"scores": [float("nan")] * 268}, "score nan"),
    ({"tokens": [*map(str, range(267)), ""]}, "characters"), ({"tokens": ["a"] * 268}, "'a' is there twice"),
    ({"bos_token_id": 268}, "268"), ({"bos_token_id": True}, "True, not an id"), ({"bos_token_id": 1.0}, "1.0, not")])
def test_sentencepiece_metadata_that_is_not_handled_is_refused_by_name(changes, word):
    tok = from_gguf(sp_metadata())
    assert tok.encode("ab é") == [1, 267, 263, 3 + 0xC3, 3 + 0xA9] and tok.decode(tok.encode("ab é")) == "ab é"
    assert tok.names == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} and tok.eos_ids == [2]
    with pytest.raises(ValueError, match=re.escape(word)):
        from_gguf(sp_metadata(**changes))


def test_the_usual_ids_of_sentencepiece_count_where_their_tokens_are_of_that_kind():
    assert [from_gguf(sp_metadata()).bos_id, *from_gguf(sp_metadata()).eos_ids] == [1, 2]
    bare = {"tokens": ["a", "b", "▁", "<x>"], "scores": [-1.0] * 4}
    for kinds, bos, eos in (([1, 1, 1, 3], None, []), ([2, 3, 1, 3], 1, []), ([1, 1, 3, 3], None, [2])):
        tok = from_gguf(sp_metadata(**bare, token_type=kinds))
        assert (tok.bos_id, tok.eos_ids, tok.add_bos) == (bos, eos, bos is not None)
        assert ("unk_token" in tok.names) == (kinds[0] == 2)
    assert from_gguf(sp_metadata(tokens=["a"], scores=[0.0], token_type=[1])).bos_id is None
    for said in ("false", 0, None):
        assert from_gguf(sp_metadata(add_bos_token=said)).add_bos, "only a bool says anything"


def test_user_defined_symbols_in_messages_stay_text():
    """A symbol that looks like a tag is vocabulary in plain text, as in SentencePiece, and text in a user's message."""
    tok = from_gguf({**sp_metadata(), "tokenizer.chat_template": "{{ messages[0].content }}<sep>"})
    sep = tok.special["<sep>"]
    assert tok.encode("a<sep>").count(sep) == 1 and sep not in tok.special_ids
    ids = ChatTemplate(tok.chat_template).encode([{"role": "user", "content": "a<sep>"}], tok)
    assert ids.count(sep) == 1 and ids[-1] == sep and tok.decode(ids) == "a<sep><sep>"


# ------------------------------------------------------------------ tokenizer.model

def model_of(trainer=None, normalizer=None, pieces=None) -> bytes:
    pieces = pieces or [("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3), *((t, 0, 6) for t in BYTES), ("<sep>", 0, 4),
                        ("▁", -1, 1), ("a", -2, 1), ("b", -3, 1), ("ab", -4, 1), ("▁ab", -5, 1)]
    return proto(pieces, {**BPE_MODEL, **(trainer or {})}, {**AS_IS, **(normalizer or {})})


PLAIN = [("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3), ("▁", -1, 1), ("a", -2, 1)]


@pytest.mark.parametrize("options, word", [
    (dict(trainer={3: 1}), "Unigram"), (dict(trainer={3: 4}), "char"), (dict(trainer={24: 1}), "whitespace_as_suffix"),
    (dict(normalizer={2: b"x"}), "precompiled_charsmap"), (dict(normalizer={5: 0}), "escape_whitespaces"),
    (dict(trainer={35: 0}), "byte_fallback"), (dict(pieces=PLAIN), "byte_fallback"),
    (dict(pieces=[*PLAIN, ("a", 0, 1)], trainer={35: 0}), "twice"),
    (dict(pieces=[*PLAIN, ("<0x41>", 0, 6)]), "bytes"),
    (dict(pieces=[*PLAIN, *(("x" * i, 0, 6) for i in range(1, 257))]), "bytes"),
    (dict(pieces=[*PLAIN, ("aa", 0, 5)], trainer={35: 0}), "'aa' is unused"),
    (dict(pieces=[*PLAIN, ("aaaa", 0, 1), ("é" * 1001, 0, 1)], trainer={35: 0}), "1000 characters"),
    (dict(pieces=[*PLAIN, ("", 0, 1)], trainer={35: 0}), "characters"),
    (dict(pieces=[*PLAIN, ("b", 0, 9)]), "byte_fallback"),
    (dict(pieces=[*PLAIN, ("b", 0, 9)], trainer={35: 0}), "types"),
    (dict(pieces=[*PLAIN, ("b", float("nan"), 1)], trainer={35: 0}), "finite"),
], ids=lambda value: str(value)[-40:])
def test_a_sentencepiece_model_that_is_not_handled_is_refused_by_name(tmp_path, options, word):
    (tmp_path / "tokenizer.model").write_bytes(model_of(**options))
    with pytest.raises(ValueError, match=re.escape(word)):
        from_folder(tmp_path)


def test_a_folder_with_a_sentencepiece_model(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model_of())
    tok = from_folder(tmp_path)
    ab, a, sep = tok.vocab_size - 1, tok.vocab_size - 4, tok.special["<sep>"]
    assert tok.encode("ab<sep>ab") == [1, ab, sep, ab - 1] and tok.decode([1, ab, sep, ab, 2]) == "ab<sep> ab"
    assert tok.special_ids == {0, 1, 2} and tok.encode("</s>a")[-1] == a and 2 not in tok.encode("</s>a")
    config = {"bos_token": "<s>", "eos_token": "<|end|>", "chat_template": "x", "legacy": True,
              "add_bos_token": False, "add_eos_token": True, "added_tokens_decoder": {
                  "0": {"content": "<unk>", "special": True}, "500": {"content": "<|end|>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tok = from_folder(tmp_path)
    assert (tok.eos_ids, tok.add_bos, tok.add_eos, tok.vocab_size, tok.chat_template) == ([500], False, True, 501, "x")
    assert tok.encode("ab") == [ab, 500] and tok.encode("ab<|end|>ab", allow_special=True) == [ab, 500, ab]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "legacy": False}))
    assert from_folder(tmp_path).encode("ab<|end|>ab", allow_special=True) == [ab, 500, ab - 1]
    folder(tmp_path, {})
    assert from_folder(tmp_path).encode("ab") == [256], "tokenizer.json counts where there are both"


def llama_ranks() -> dict[bytes, int]:
    tokens = [bytes([b]) for b in reversed(range(256))] + [bytes(t) for t in itertools.product(range(256), repeat=2)]
    tokens += [bytes(t) for t in itertools.islice(itertools.product(range(97, 123), repeat=4), 128_000 - len(tokens))]
    return {token: rank for rank, token in enumerate(tokens)}


def test_llama_3_tokenizer_model(tmp_path):
    ranks = llama_ranks()
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "tokenizer.model").write_bytes(
        b"\n".join(base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()))
    tok = from_folder(tmp_path)
    assert (tok.vocab_size, tok.bos_id, tok.eos_ids, tok.add_bos) == (128_256, 128_000, [128_001], True)
    assert (tok.special["<|start_header_id|>"], tok.special["<|eot_id|>"], len(tok.special)) == (128_006, 128_009, 256)
    import tiktoken

    reference = tiktoken.Encoding("x", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})
    for text in [*HARD, *corpus(9, 200)]:
        assert tok.encode(text, bos=False) == reference.encode_ordinary(text)
        assert tok.decode(tok.encode(text)) == text


@pytest.mark.parametrize("data, word", [(b"\n\x0c\n\x05<unk>\x15\0\0\0\0", "SentencePiece"), (b"YQ== x",
                                                                                              "SentencePiece"),
                                        (b"YQ== 0\nYg== 1", "2 tokens"), (b"", "0 tokens"), (b"YQ==", "SentencePiece")])
def test_another_tokenizer_model_is_refused_by_name(tmp_path, data, word):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(ValueError, match=word):
        from_folder(tmp_path)


# ------------------------------------------------------------------ folders

def folder(path: Path, config: dict | None = None, **files: str) -> Path:
    (path / "tokenizer.json").write_text(json.dumps(tree()))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_a_folder(tmp_path):
    path = folder(tmp_path, {"eos_token": {"content": "<|e|>"}, "bos_token": None, "chat_template": "A",
                             "added_tokens_decoder": {
        "300": {"content": "<|new|>", "special": True}, "257": {"content": "<|e|>", "special": True}}})
    tok = from_folder(path)
    assert tok.eos_ids == [257] and tok.bos_id is None and tok.chat_template == "A" and tok.special["<|new|>"] == 300
    assert tok.encode("ab") == [256] and tok.names == {"eos_token": "<|e|>"}
    folder(path, chat_template__jinja="B {{ eos_token }}")
    assert from_folder(str(path)).chat_template == "B {{ eos_token }}"
    folder(path, {"chat_template": [{"name": "tool", "template": "x"}, {"name": "default", "template": "C"}]})
    (path / "chat_template.jinja").unlink()
    assert from_folder(path).chat_template == "C"
    folder(path, {}, special_tokens_map__json='{"eos_token": "<|e|>"}')
    tok = from_folder(path)
    assert tok.eos_ids == [257] and tok.chat_template is None


def plain_entry(content, **flags) -> dict:
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, **flags}


@pytest.mark.parametrize("post", [None, template_of("<s>"), template_of("<s>", "</s>")], ids=["", "bos", "bos-eos"])
@pytest.mark.parametrize("config", [
    {}, {"bos_token": "<s>", "eos_token": "</s>"}, {"pad_token": "</s>", "unk_token": "<t>", "sep_token": "<s>"},
    {"additional_special_tokens": ["</s>", "<t>"]}, {"extra_special_tokens": ["ab", "<s>"]}, {"cls_token": "ab"},
    {"map": {"eos_token": plain_entry("</s>", rstrip=True)}}, {"map": {"bos_token": plain_entry("<s>", lstrip=True)}},
    {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"},
    {"add_bos_token": False, "bos_token": "<s>"}, {"add_bos_token": None, "eos_token": None, "bos_token": "<s>"},
    {"added_tokens_decoder": {"259": plain_entry("<t>", special=True)}},
    {"added_tokens_decoder": {"259": plain_entry("<t>", rstrip=True), "260": plain_entry("<new>", lstrip=True)}},
    {"eos_token": "</s>", "added_tokens_decoder": {"2": plain_entry("</s>", special=False, rstrip=True)}},
    {"add_prefix_space": True}, *({"add_prefix_space": said, "tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>",
                                   "bos_token": "<s>", "unk_token": "<s>"} for said in (True, False))], ids=str)
def test_a_folder_equals_transformers(tmp_path, config, post):
    """Which tokens are control tokens, flags, BOS and EOS, the space in front, by every word of the small files."""
    AutoTokenizer = pytest.importorskip("transformers").AutoTokenizer
    texts = [V.ALPHABET[0], "<s>", "</s>", *V.ALPHABET[1:], "ab"]
    data = json.loads(library({text: id for id, text in enumerate(texts)}, [("a", "b")]).to_str())
    data.update(post_processor=post, added_tokens=[{"id": 259, **plain_entry("<t>"), "special": False}])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{% for m in messages %}"
              "{{ bos_token }}{{ m.content }}{{ eos_token }}<t> {% endfor %}", **config}
    for name, content in (("tokenizer.json", data), ("special_tokens_map.json", config.pop("map", {})),
                          ("tokenizer_config.json", config)):
        (tmp_path / name).write_text(json.dumps(content))
    tok, theirs = from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert tok.encode("ab") == theirs("ab")["input_ids"]
    for text in ("a", " ab", "ab</s>  ab <s>x", "<t> b<t>", "<s>ab", "a  <new>  b", "</s>", "ab <|im_end|>\n\n</s> "):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert tok.encode(text, bos=False, allow_special=True) == ids, text
        for skip in (True, False):
            assert tok.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)
    messages = [{"role": "user", "content": "ab "}, {"role": "assistant", "content": " b"}]
    ids = theirs.apply_chat_template(messages, return_dict=False)
    ours = ChatTemplate(tok.chat_template).encode(messages, tok)
    assert ours == [1] * (tok.add_bos and ids[0] != 1) + ids, "chat.py: a BOS is in front if the tokenizer adds one"


def test_flags_of_an_added_token_under_another_id_are_refused(tmp_path):
    folder(tmp_path, {"added_tokens_decoder": {"400": {"content": "<|e|>"}}})
    with pytest.raises(ValueError, match=r"'<\|e\|>' has id 400 .* 257"):
        from_folder(tmp_path)


def test_a_symbol_or_piece_of_a_tokenizer_model_that_is_named_as_eos_is_a_control_token(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model_of())
    for name, whole in (("<sep>", "a<sep>"), ("ab", "a ab")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": name, "add_bos_token": None}))
        tok = from_folder(tmp_path)
        assert tok.eos_ids == [tok.special[name]] and tok.special[name] in tok.special_ids and tok.add_bos
        assert tok.encode(whole, allow_special=True)[-1:] == tok.eos_ids and tok.decode(tok.eos_ids) == ""
    assert tok.special_ids == {0, 1, 2, tok.special["ab"]}


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        from_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"model": ', "[" * 100_000, "null", '"x"', b"\xff\xfe{}",
                                  b'{"\xed": 1}'])
def test_a_file_that_is_no_json_object_is_one_clear_error(tmp_path, text):
    (tmp_path / "tokenizer.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        from_folder(tmp_path)


def test_a_huge_file_is_not_read(tmp_path):
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(V.MAX_JSON + 1)
    with pytest.raises(ValueError, match="at most"):
        from_folder(tmp_path)
    folder(tmp_path, {"pad": "x" * V.MAX_CONFIG})
    with pytest.raises(ValueError, match=r"tokenizer_config\.json .* at most"):
        from_folder(tmp_path)


# ------------------------------------------------------------------ the plain dict

def contract(module) -> str:
    """The description of the keys in a file's docstring: from "kind" on, up to the next empty line."""
    return re.search(r"    kind  .*?\n\n", module.__doc__, re.DOTALL)[0]


def test_the_keys_stand_in_both_files_in_the_same_words():
    names = set(inspect.signature(Tokenizer).parameters)
    assert contract(V) == contract(T)
    described = set(re.findall(r"\w+", " ".join(re.findall(r"^    (\w+(?:, \w+)*)  ", contract(V), re.MULTILINE))))
    assert described == names


def plain(value) -> bool:
    if isinstance(value, dict):
        return all(map(plain, (*value.keys(), *value.values())))
    return all(map(plain, value)) if type(value) in (list, tuple) else value is None or type(value) in (
        str, bytes, int, float, bool)


@pytest.mark.parametrize("read, data", [
    (V.read_json, lambda: tree()), (V.read_json, lambda: tree(normalizer={"type": "NFC"}, model__ignore_merges=True)),
    (V.read_gguf, lambda: small_gguf()), (V.read_gguf, lambda: sp_metadata()),
    (lambda data: V._from_protobuf(data, {"legacy": False}), lambda: model_of())])
def test_every_reader_gives_all_keys_and_nothing_but_plain_data(read, data):
    made = read(data())
    assert set(made) == set(inspect.signature(Tokenizer).parameters) and plain(made)
    assert all(set(token) == set(T.Added._fields) for token in made["added"])
    assert not plain({"a": {1}}) and not plain([V.MARK, T.Added("a", 1)])


def test_the_same_vocabulary_from_two_files_is_the_same_dict():
    """GGUF's Qwen2 and the tokenizer.json that it comes from, key by key."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": V.QWEN2}, "behavior": "Isolated", "invert": False}
    special = {"id": 257, "content": "<|e|>", "special": True, "normalized": False}
    data = {"model": {"type": "BPE", "vocab": {c: i for i, c in enumerate([*V.ALPHABET, "ab"])}, "merges": ["a b"]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}, "normalizer": {"type": "NFC"},
            "added_tokens": [special]}
    one = V.read_json(data, {"eos_token": "<|e|>", "chat_template": "x"})
    two = V.read_gguf({**{f"tokenizer.ggml.{key}": value for key, value in {
        "model": "gpt2", "pre": "qwen2", "tokens": [*V.ALPHABET, "ab", "<|e|>"], "merges": ["a b"],
        "token_type": [1] * 257 + [3], "eos_token_id": 257}.items()}, "tokenizer.chat_template": "x"})
    assert two["vocab"].pop(b"<|e|>") == 257, "GGUF does not tell added tokens from those that merges make"
    assert one == two and one["merges"] == [(97, 98, 256)] and one["cuts"] == [V.QWEN2]


def test_a_vocabulary_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="'words'"):
        Tokenizer(**{**V.read_json(tree()), "kind": "words"})


# ------------------------------------------------------------------ damaged files

def mutate(rng: random.Random, node, depth: int = 0):
    """A copy of a JSON tree with one random place changed."""
    junk = (None, True, -1, 10**30, 0.5, "", "x", "\ud800", "<|e|>", [], {}, [None], {"type": "ByteLevel"}, [["a"]],
            float("nan"))
    if depth and (not isinstance(node, (dict, list)) or not node or rng.random() < 0.15):
        return rng.choice(junk)
    if isinstance(node, dict) and node:
        key = rng.choice(list(node))
        if rng.random() < 0.15:
            return {k: v for k, v in node.items() if k != key}
        return {**node, key: mutate(rng, node[key], depth + 1)}
    if isinstance(node, list) and node:
        i = rng.randrange(len(node))
        return [*node[:i], mutate(rng, node[i], depth + 1), *node[i + 1:]]
    return rng.choice(junk)


def only_value_errors(make, attempts):
    """Runs make(i) and uses what it makes; anything but a ValueError fails. Returns how many were refused."""
    refused = 0
    for i in range(attempts):
        try:
            tok = make(i)
            ids = tok.encode("ab <|e|> é12\n", allow_special=True)
            assert isinstance(tok.decode(ids), str) and tok.vocab_size >= 0
            if tok.chat_template is not None:
                ChatTemplate(tok.chat_template).encode([{"role": "user", "content": "x<|e|>"}], tok)
        except ValueError:
            refused += 1
    return refused


@pytest.mark.parametrize("changes", [{"model__type": "\x1b[2J" * 500}, {"model__merges": ["\x07 \x00 \u202e"]},
                                     {"added_tokens": [{"id": "\x1b]0;x", "content": "ab"}]}])
def test_what_a_file_says_comes_to_the_terminal_short_and_harmless(changes):
    with pytest.raises(ValueError, match=r"tokenizer\.json") as caught:
        V.read_json(tree(**changes))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_damaged_json_ends_in_a_value_error_only():
    rng = random.Random(11)
    whole = [tree(post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|e|>"}},
                                                                           {"Sequence": {}}]},
                  normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]}),
             {"bos_token": {"content": "<|e|>"}, "eos_token": "<|e|>", "chat_template": "{{ messages[0].content }}",
              "added_tokens_decoder": {"300": {"content": "<|x|>", "special": True, "lstrip": True}},
              "add_bos_token": True}]

    def make(_):
        changed = whole
        for _ in range(rng.randint(1, 3)):
            changed = mutate(rng, changed, depth=0)
        data, config = [*changed, None, None][:2] if isinstance(changed, list) else (changed, None)
        return from_json(data, config)

    assert only_value_errors(make, 600) > 150


def test_damaged_metadata_ends_in_a_value_error_only():
    rng = random.Random(12)
    whole = small_gguf(add_bos_token=True, padding_token_id=3, unknown_token_id=4) | {"tokenizer.chat_template": CHATML}

    def make(_):
        changed = whole
        for _ in range(rng.randint(1, 3)):
            changed = mutate(rng, changed, depth=1 if rng.random() < 0.05 else 0)
        return from_gguf(changed if isinstance(changed, dict) else {})

    assert only_value_errors(make, 600) > 100


def test_damaged_files_end_in_a_value_error_only(tmp_path):
    rng = random.Random(13)
    good = {"tokenizer.json": json.dumps(tree()).encode(), "tokenizer_config.json": b'{"eos_token": "<|e|>"}',
            "tokenizer.model": b"\n".join(base64.b64encode(bytes([b])) + b" %d" % b for b in range(256))}

    def make(i):
        path = tmp_path / str(i)
        path.mkdir()
        for name, data in good.items():
            data = bytearray(data)
            for _ in range(rng.randint(0, 3)):
                at = rng.randrange(len(data))
                data[at:at + rng.randint(0, 4)] = rng.randbytes(rng.randint(0, 3))
            if not (name == "tokenizer.json" and i % 3 == 0):
                (path / name).write_bytes(data)
        return from_folder(path)

    assert only_value_errors(make, 150) > 50


def test_damaged_sentencepiece_models_end_in_a_value_error_only():
    """Bytes changed, lengths of 2**62, numbers that never end."""
    rng, whole = random.Random(14), model_of()

    def make(i):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data)) if i % 2 else rng.choice((0, 1, len(data) - rng.randint(1, 20)))
            data[at:at + rng.randint(0, 4)] = rng.choice((rng.randbytes(rng.randint(0, 3)), varint(1 << 62),
                                                          b"\xff" * 12))
        with V._reading("tokenizer.model"):
            return Tokenizer(**V._from_protobuf(bytes(data), {}))

    assert only_value_errors(make, 500) > 150


@pytest.mark.parametrize("data", [
    b"\n" + varint(1 << 62), b"\n\0" * 3000, b"\n" + b"\xff" * 50, b"\n", b"\x0b", field(2, field(3, 2)), field(1, 5),
    field(2, 7), field(2, field(3, 2)) + b"\n\x02\n\x05", b"\n" * (1 << 25), field(2, field(3, b"x")),
    field(2, field(3, 2)) + field(3, 5), field(1, field(1, b"\xff")) + field(2, field(3, 2))],
    ids=lambda data: str(data[:9]))
def test_hostile_sentencepiece_models_end_in_a_value_error_without_much_memory(data, monkeypatch):
    monkeypatch.setattr(V, "MAX_PIECES", 1000)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"tokenizer\.model"), V._reading("tokenizer.model"):
        V._from_protobuf(data, {})
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("data", [b"\x50\1" * 8_000_000, b"\n\0" * 8_000_000, field(2, b"\x18\1" * 8_000_000)[:1 << 24],
                                  field(2, b"\x18\1" * 7_000_000), b"".join(field(i, 1) for i in range(1, 99))],
                         ids=lambda data: str(data[:2]) + str(len(data)))
def test_too_many_fields_end_a_sentencepiece_model_early(data, monkeypatch):
    """16 MB of tiny fields, or a field of each number: one sentence, before much has been collected."""
    monkeypatch.setattr(V, "MAX_PIECES", 1 << 14)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"not so many fields|beyond the end"):
        V._from_protobuf(data, {})
    assert tracemalloc.get_traced_memory()[1] < (1 << 21) + 2 * len(data)
    tracemalloc.stop()


def test_the_fields_of_all_messages_count():
    budget = iter(range(5))
    with pytest.raises(ValueError, match="not so many fields"):
        for _ in range(3):
            V._message(b"\x08\1" * 2, budget)
    assert next(budget, None) is None


def test_damaged_sentencepiece_json_and_metadata_end_in_a_value_error_only():
    rng = random.Random(15)
    tok, theirs = llama2(template_of("<s>", "</s>"))
    data = json.loads(theirs.to_str())
    keep = list(data["model"]["vocab"])[:300]
    data["model"].update(vocab={t: i for i, t in enumerate(keep)},
                         merges=[m for m in data["model"]["merges"] if {*m, "".join(m)} <= set(keep)])
    wholes = [data, {**data, "normalizer": None, "pre_tokenizer": json.loads(FORMS["first"][1].__getstate__())}]

    def make(i):
        changed = wholes[i % 2] if i % 3 else sp_metadata()
        for _ in range(rng.randint(1, 3)):
            changed = mutate(rng, changed, depth=0)
        changed = changed if isinstance(changed, dict) else {}
        return from_json(changed, {}) if i % 3 else from_gguf(changed)

    assert only_value_errors(make, 600) > 150
