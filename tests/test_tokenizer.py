"""tokenizer.py against the `tokenizers` library and sentencepiece, case by case and at random."""
import functools
import itertools
import json
import random
import struct
import time
import unicodedata
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

import tokenizer as T
import vocab as V
from chat import ChatTemplate
from tokenizer import BytePairs, Tokenizer
from vocab import GPT2, LLAMA3, QWEN2

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = {"gpt2": [GPT2], "llama3": [LLAMA3], "qwen2": [QWEN2], "smollm2": [V.DIGIT, GPT2]}
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

HARD = [
    "", " ", "\n", "Hello, world!", "I'LL go, i'll go, WE'VE, they'Re, 'S '\u017f 'T'",
    "12345 1,000.50 ٣٤٥ ²³ ½ Ⅷ 一二三 १२३",
    "    def f(x):\n\t\treturn x  # note\r\n\r\n\n   \n", "a   b",
    "  \u00a0 \u3000x\u2003\u2003y \x85\x1c\x1d\x1e\x1f z",
    "季節は巡る。한국어 텍스트 中文,混合 text", "👩‍👩‍👧‍👦 🏳️‍🌈 😀😀 e\u0301 é ñ n\u0303 ≯ >\u0338",
    "عربى עברית ไทย हिन्दी",
    "<|im_end|> <|endoftext|> <|im_start|>user <repo_name> <|fake|> <| im_end |>", "\x00\x01\x04\x06\x7f\x80\xad\xff",
    "x²y½ foo\r\n\tbar \n\nHello (abc) -> 1.5", "^" * 300 + "=" * 77 + " " * 129 + "\t" * 33 + "\n" * 50 + "a" * 200,
    "".join(map(chr, range(0x250))), "https://example.org/?q=1&b=%20#frag --flag=--x __init__ CamelCaseWord snake_case",
    "\U000407ff\U0009abcd\U0010fffe\ufdd0\ufffe\ufeff\u200b\u200d", "\u2028\u2029\u0085\u180e\u200e",
]


def family_pre_tokenizer(name: str):
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name in ("gpt2", "smollm2"))
    first = {"gpt2": [], "smollm2": [pre_tokenizers.Digits(individual_digits=True)],
             "llama3": [pre_tokenizers.Split(Regex(LLAMA3), "isolated")],
             "qwen2": [pre_tokenizers.Split(Regex(QWEN2), "isolated")]}[name]
    return pre_tokenizers.Sequence([*first, level]) if first else level


def library(vocab, merges, family="gpt2", special=(), nfc=False, **options) -> Library:
    """A tokenizer of the library; tokens of `special` are added after the vocabulary (or found in it)."""
    made = Library(models.BPE(vocab=vocab, merges=merges, **options))
    made.pre_tokenizer, made.decoder = family_pre_tokenizer(family), decoders.ByteLevel()
    if nfc:
        made.normalizer = normalizers.NFC()
    made.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    return made


def from_json(data: dict, config: dict | None = None) -> Tokenizer:
    return Tokenizer(**V.read_json(data, config))


def from_gguf(metadata: dict) -> Tokenizer:
    return Tokenizer(**V.read_gguf(metadata))


def from_folder(path) -> Tokenizer:
    return Tokenizer(**V.read_folder(path))


def byte_pairs(vocab: dict[str, int], merges) -> BytePairs:
    """The engine alone, of texts in the byte alphabet."""
    return BytePairs({V.token_to_bytes(text): id for text, id in vocab.items()},
                     [(vocab[left], vocab[right], vocab[left + right]) for left, right in merges])


def ours(made: Library, config: dict | None = None, **model) -> Tokenizer:
    data = json.loads(made.to_str())
    data["model"].update(model)
    return from_json(data, config)


def toy(merges=(), special=("<|im_start|>", "<|im_end|>"), config=None, family="gpt2", **changes) -> Tokenizer:
    """256 bytes (id = byte), then what the merges make, then the special tokens."""
    made = list(dict.fromkeys("".join(m) for m in map(str.split, merges)))
    vocab = {token: i for i, token in enumerate([*V.ALPHABET, *made])}
    data = json.loads(library(vocab, [tuple(m.split()) for m in merges], family, special).to_str())
    return from_json({**data, **changes}, {"chat_template": CHATML, **(config or {})})


BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def bos_tokenizer(template=BOS_TEMPLATE, **config) -> Tokenizer:
    post = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                                     {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
                                                     "special_tokens": {}}
    return toy(special=["<s>", "<|im_start|>", "<|im_end|>"], post_processor=post,
               config={"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>", "chat_template": template, **config})


def library_of(metadata: dict) -> Library:
    """The library's tokenizer with the default model's vocabulary."""
    texts, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    vocab = {text: i for i, text in enumerate(texts)}
    merges = [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]
    return library(vocab, merges, "smollm2", [t for t, kind in zip(texts, kinds) if kind == 3])


@pytest.fixture(scope="session")
def smol_library(metadata) -> Library:
    return library_of(metadata)


@pytest.fixture(scope="session")
def real_merges(metadata) -> list[str]:
    return metadata["tokenizer.ggml.merges"][:6000]


def corpus(seed: int, n: int) -> list[str]:
    """Random texts over everything that pre-tokenizers look at."""
    rng = random.Random(seed)
    atoms = [*"aAbzé 0199'\"\n\n\t\r   ..,!?-_<>|=()٣²½季漢한🙂", "'s", "'LL", "the", " of", "  ", "\r\n", "\u00a0",
             "e\u0301",
             "\u200d", "\u017f", "\u0338", "ing", "tion", " http", "\x1c", "\x04", "\U000407ff"]
    return ["".join(rng.choices(atoms, k=rng.randint(1, 40))) for _ in range(n)]


# ------------------------------------------------------------------ pre-tokenisation

@pytest.mark.parametrize("text, expected", [
    (" 12345 apples", {"gpt2": [" 12345", " apples"], "llama3": [" ", "123", "45", " apples"],
                       "qwen2 smollm2": [" ", "1", "2", "3", "4", "5", " apples"]}),
    ("I'LL go", {"llama3 qwen2": ["I", "'LL", " go"], "gpt2 smollm2": ["I", "'", "LL", " go"]}),
    ("(abc) -> 1.5", {"llama3 qwen2": ["(abc", ")", " ->"], "gpt2 smollm2": ["(", "abc", ")", " ->"]}),
    ("x²y½", {"gpt2 llama3 qwen2 smollm2": ["x", "²", "y", "½"]}),
])
def test_tk_06_each_family_cuts_its_own_way(text, expected):
    """TK-06 (ggml-org/llama.cpp #6920, #8609): the pre-tokenizer differs per family; \\d is not \\p{N}."""
    for names, pieces in expected.items():
        for name in names.split():
            assert T.pretokenize(text, list(map(T.compile_cut, FAMILIES[name])))[:len(pieces)] == pieces


def test_tk_15_newlines_are_cut_per_family():
    """TK-15 (ggml-org/llama.cpp #6809): runs of newlines stay whole for Llama 3 and Qwen2, and split for the others."""
    def cut(name, text):
        return T.pretokenize(text, list(map(T.compile_cut, FAMILIES[name])))

    for name in ("llama3", "qwen2"):
        assert cut(name, "\n\nHello") == ["\n\n", "Hello"] and cut(name, "foo\r\n\tbar") == ["foo", "\r\n", "\tbar"]
    for name in ("gpt2", "smollm2"):
        assert cut(name, "\n\nHello") == ["\n", "\n", "Hello"]
        assert cut(name, "foo\r\n\tbar") == ["foo", "\r\n", "\t", "bar"]


def test_tk_08_a_control_token_after_punctuation_and_indentation():
    """TK-08 (JustVugg/colibri #1653): a control token is found before the punctuation rule can take its "<|"; of a
    run of spaces the last one belongs to the word."""
    tok = toy()
    assert tok.encode("ok.<|im_end|>", allow_special=True) == [*b"ok.", tok.special["<|im_end|>"]]
    assert T.pretokenize("a   b", [T.compile_cut(GPT2)]) == ["a", "  ", " b"]


@functools.cache
def code_points(every: int) -> list[int]:
    """All assigned code points but surrogates and private use; of the many uniform letters (CJK..) one in `every`."""
    return [c for c in range(0x110000) if (kind := unicodedata.category(chr(c))) not in ("Cn", "Cs", "Co")
            and not (kind == "Lo" and c > 0x3400 and c % every)]


@pytest.mark.parametrize("every", [101, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAMILIES)
def test_cuts_equal_the_library_for_every_code_point(name, every):
    cuts, theirs, points = list(map(T.compile_cut, FAMILIES[name])), family_pre_tokenizer(name), code_points(every)
    points = points if every == 1 else points[::3]
    for start in range(0, len(points), 2000):
        text = "".join(f"{c}a {c}{c}1'{c}\n{c} " for c in map(chr, points[start:start + 2000]))
        assert T.pretokenize(text, cuts) == [text[a:b] for _, (a, b) in theirs.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", FAMILIES)
def test_cuts_equal_the_library_on_random_text(name):
    cuts, theirs = list(map(T.compile_cut, FAMILIES[name])), family_pre_tokenizer(name)
    for text in [*HARD, *corpus(1, 1500)]:
        assert T.pretokenize(text, cuts) == [text[a:b] for _, (a, b) in theirs.pre_tokenize_str(text)], repr(text)


def test_a_split_that_leaves_gaps_or_comes_in_several_steps_equals_the_library():
    several = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥]+", r"\p{N}"]
    possessive = [r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"]
    cased = [r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
             r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}"]
    for steps in (several, possessive, cased):
        theirs = pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(s), "isolated") for s in steps),
                                          pre_tokenizers.ByteLevel(False, use_regex=False)])
        for text in [*HARD, *corpus(2, 300)]:
            assert T.pretokenize(text, list(map(T.compile_cut, steps))) == [
                text[a:b] for _, (a, b) in theirs.pre_tokenize_str(text)]


@pytest.mark.parametrize("pattern", [
    "[[:alpha:]]+", "[a&&b]", "[a[b]]", r"(a)\1", r"\bx", r"\d+", "(?<=a)b", "(?P<n>a)", "(?R)", "a{1,3}+", "^a", "a$",
    "(", "[", "*", r"\p{NoSuchThing}", "a" * 20_000, r"(?x) a", None, 5, "(?:(?:a{60000}){60000}){60000}", "(a|b)*",
    "(ab)+",
    "(?:a){2}", "(?:a)?{2}", "a{10}", "a{1,60000}", "(?:" * 300 + "a" + ")" * 300])
def test_regexes_that_engines_read_differently_or_that_explode_are_refused(pattern):
    with pytest.raises(ValueError, match="regex"):
        T.compile_cut(pattern)


def test_a_regex_that_backtracks_for_ever_ends_in_an_error():
    cut = T.compile_cut("a*" * 30 + "[^a]{2}")

    class Hurried:  # the same regex with a limit that a test can wait for
        pattern = cut.pattern

        def finditer(self, text, timeout):
            assert timeout < 11
            return cut.finditer(text, timeout=0.2)

    with pytest.raises(ValueError, match="backtracks for ever"):
        T.pretokenize("a" * 2000 + "ba" * 3, [Hurried()])


def test_tk_05_the_rank_decides_not_the_id():
    """TK-05 (ztxz16/fastllm #715): the lowest rank merges first, wherever it is; the order of ids is another order."""
    vocab = {**{c: i for i, c in enumerate(V.ALPHABET)}, "bc": 256, "ab": 257}
    pairs = byte_pairs(vocab, [("a", "b"), ("b", "c")])
    assert pairs.ids("abc") == [257, ord("c")]
    assert pairs._merge([97, 98, 99]) == [257, ord("c")]


def random_vocabulary(rng: random.Random, ambiguous: bool):
    """A vocabulary that training would not make: shuffled ids with holes, tokens that no merge makes, bytes that are
    missing; ambiguous: several merges for one token, parts that come later, pairs listed twice."""
    letters = rng.choice(("ab", "abc"))
    pool, merges = list(letters), []
    for _ in range(rng.randint(1, 14)):
        left, right = rng.choice(pool), rng.choice(pool)
        if len(left + right) <= 8 and (ambiguous or left + right not in pool):
            merges.append((left, right))
            pool += [left + right] * (left + right not in pool)
    if ambiguous:
        rng.shuffle(merges)
        merges += rng.sample(merges, k=min(len(merges), rng.randint(0, 2)))
    unmade = ("".join(rng.choices(letters, k=rng.randint(2, 5))) for _ in range(3))
    tokens = list(dict.fromkeys([*V.ALPHABET, *pool, *unmade]))
    gone = rng.choice("abc!Ã")
    if rng.random() < 0.4 and not any(gone in pair for pair in merges):
        tokens.remove(gone)
    ids = rng.sample(range(len(tokens) + rng.randint(0, 5)), k=len(tokens))
    return dict(zip(tokens, ids)), merges


def disagreements(cases: int, seed: int, change=lambda tok: None) -> tuple[int, int, int]:
    """(texts on which ours and the library differ, vocabularies that tiktoken serves, those that it does not)."""
    rng, wrong, fast, slow = random.Random(seed), 0, 0, 0
    for case in range(cases):
        vocab, merges = random_vocabulary(rng, ambiguous=case % 3 == 0)
        theirs = library(vocab, merges, ignore_merges=rng.random() < 0.3)
        tok = ours(theirs, merges=[" ".join(pair) for pair in merges] if case % 2 else merges)
        fast, slow = fast + (tok.pairs.engine is not None), slow + (tok.pairs.engine is None)
        change(tok)
        for merged in (0, T.HEAP_BYTES):  # by the heap, then by tiktoken
            tok.pairs.merged = merged
            tok._cache.clear()
            for _ in range(15):
                text = "".join(rng.choices("aaabbbccc !é", k=rng.randint(0, 14)))
                wrong += tok.encode(text) != theirs.encode(text).ids
    return wrong, fast, slow


def test_ids_equal_the_library_for_random_vocabularies():
    wrong, fast, slow = disagreements(300, seed=0)
    assert wrong == 0 and fast > 65 and slow > 65


@pytest.mark.slow
def test_ids_equal_the_library_for_very_many_random_vocabularies():
    assert disagreements(6_000, seed=1)[0] == 0


def test_the_random_vocabularies_would_catch_tiktoken_used_without_proof():
    def always_tiktoken(tok):
        if tok.pairs.engine is None:
            tok.pairs.engine = T._engine({bytes([b]): b for b in range(256)} | {
                tok._tokens[i]: 256 + rank for rank, i in enumerate(tok.pairs.made)})

    assert disagreements(200, seed=0, change=always_tiktoken)[0] > 20


def test_the_heap_is_textbook_bpe():
    def textbook(pairs, ids):
        while ranked := [(pairs.merges[p], i) for i, p in enumerate(itertools.pairwise(ids)) if p in pairs.merges]:
            (_, made), i = min(ranked)
            ids[i:i + 2] = [made]
        return ids

    rng = random.Random(3)
    for _ in range(600):
        pairs = byte_pairs(*random_vocabulary(rng, ambiguous=True))
        for _ in range(5):
            ids = [i for c in rng.choices("aabbc", k=rng.randint(1, 12)) if (i := pairs.base[ord(c)]) is not None]
            assert pairs._merge(list(ids)) == textbook(pairs, list(ids))


def test_where_tiktoken_is_used_it_agrees_with_the_heap_on_all_short_texts():
    rng, proven = random.Random(5), 0
    texts = ["".join(t) for n in range(1, 8) for t in itertools.product("ab", repeat=n)]
    while proven < 60:
        vocab, merges = random_vocabulary(rng, ambiguous=False)
        pairs = byte_pairs(vocab, merges)
        if pairs.engine is not None and not pairs.missing:
            proven, pairs.merged = proven + 1, T.HEAP_BYTES
            for text in texts:
                assert pairs.ids(text) == pairs._merge([pairs.base[b] for b in text.encode()])


def test_tiktoken_takes_over_where_there_is_much_text():
    tok = toy(["a b"])
    assert tok.encode("ab " * 5000)[:2] == [256, 32] and "engine" not in vars(tok.pairs)
    tok.encode("ab" * (T.HEAP_BYTES // 2))
    assert vars(tok.pairs)["engine"] is not None
    assert tok.encode("abba ab") == [256, *b"ba ", 256]


def test_bytes_that_the_vocabulary_lacks_are_dropped_before_merging():
    """As the library does: with "!" gone the letters around it are neighbours and merge."""
    vocab = {c: i for i, c in enumerate(V.ALPHABET) if c not in "!Ã"} | {"ab": 300, "??": 301}
    for unk in (None, "??"):
        theirs = library(vocab, [("a", "b"), ("?", "?")], "llama3", unk_token=unk)
        tok = ours(theirs)
        for text in ("a!b", "!", "!!?!?", "é!", "ab!ab", "?a!b?"):
            assert tok.encode(text) == theirs.encode(text).ids


# ------------------------------------------------------------------ whole tokenizers

def test_the_default_model(smol):
    assert smol.vocab_size == 49152 and smol.eos_ids == [2] and not smol.add_bos
    assert smol.pairs.engine is not None and len(smol.pairs.missing) == 21
    assert smol.encode("Why is the sky blue?") == [4898, 314, 260, 6376, 4461, 47]
    assert smol.names["eos_token"] == "<|im_end|>" and "im_start" in smol.chat_template


def test_the_default_vocabulary_equals_the_library(smol, smol_library):
    smol_library.encode_special_tokens = True  # the library's name for: control tokens are not recognised
    for text in [*HARD, *corpus(3, 2500), (ROOT / "README.md").read_text() * 3, Path(T.__file__).read_text()]:
        assert smol.encode(text) == smol_library.encode(text).ids, repr(text[:200])
    smol_library.encode_special_tokens = False
    for text in [*HARD, *corpus(4, 300)]:
        text = text.replace("季", "<|im_end|>").replace("漢", "<|endoftext|><repo_name>")
        assert smol.encode(text, allow_special=True) == smol_library.encode(text).ids, repr(text)


def test_single_bytes_and_every_class_of_character_equal_the_library(smol, smol_library):
    points = code_points(101)
    for i in range(0, len(points), 500):
        text = "".join(map(chr, points[i:i + 500]))
        assert smol.encode(text) == smol_library.encode(text).ids
    for c in map(chr, [*range(0x300), *range(0x3FF00, 0x40100), 0x10FFFF]):
        assert smol.encode(c) == smol_library.encode(c).ids, repr(c)


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_equal_the_library(name, ignore_merges, real_merges):
    """6,000 real merges under each family's cuts, ids shuffled; tokens that no merge makes; NFC for Qwen."""
    rng = random.Random(name)
    merges = [tuple(m.split(" ")) for m in real_merges]
    tokens = list(dict.fromkeys([*V.ALPHABET, *("".join(m) for m in merges), "Ġhttp", "snake", "ĊĊĊĊ", "Ġ12345"]))
    theirs = library(dict(zip(tokens, rng.sample(range(len(tokens)), k=len(tokens)))), merges, name,
                     ["<|im_start|>", "<|im_end|>", "<|im_end|>!"], nfc=name == "qwen2",
                     ignore_merges=ignore_merges)
    tok = ours(theirs)
    for text in [*HARD, *corpus(6, 700)]:
        text = text.replace("漢", "<|im_end|>").replace("季", "<|im_end|>!")
        assert tok.encode(text, allow_special=True) == theirs.encode(text).ids, repr(text)
        assert tok.decode(tok.encode(text)) == tok._normalize(text) or tok.pairs.missing


def test_llama_3_in_hugging_face_form_lists_all_ways_to_a_token(real_merges):
    """Converted from tiktoken, that list holds every split of every token: several merges make one token, so tiktoken
    is not used, and ids still equal the library's."""
    made = ["".join(m.split(" ")) for m in real_merges[:1500]]
    known = {*V.ALPHABET, *made}
    merges = [(t[:k], t[k:]) for t in made for k in range(1, len(t)) if t[:k] in known and t[k:] in known]
    theirs = library({t: i for i, t in enumerate([*V.ALPHABET, *made])}, merges, "llama3", ignore_merges=True)
    tok = ours(theirs)
    assert tok.pairs.engine is None and len(merges) > len(made)
    for text in [*HARD, *corpus(7, 1500)]:
        assert tok.encode(text) == theirs.encode(text).ids, repr(text)


def test_a_megabyte_takes_a_few_seconds(smol, smol_library):
    rng = random.Random(0)
    text = "".join(rng.choices([*HARD[3:15], *corpus(8, 300), Path(T.__file__).read_text()[:3000]], k=4000))[:1_000_000]
    start = time.perf_counter()
    ids = smol.encode(text)
    assert time.perf_counter() - start < 15  # about half a second on two quiet cores
    smol_library.encode_special_tokens = True
    assert ids == smol_library.encode(text).ids


@pytest.mark.parametrize("engine", ["tiktoken", "heap"])
def test_tk_17_very_long_runs(engine):
    """TK-17 (openai/tiktoken #195, #245, #391): runs of equal characters are neither slow nor too deep. Past a million
    spaces tiktoken's own regex panics; here it is not used for cutting."""
    tok = toy(["^ ^", "^^ ^^", "a a", "aa aa", "Ġ Ġ", "ĠĠ ĠĠ"])
    tok.pairs.merged = T.HEAP_BYTES
    if engine == "heap":
        tok.pairs.engine = None
    start = time.perf_counter()
    for char, n in (("^", 200_000), ("a", 32_000), (" ", 200_000)):
        ids = tok.encode(char * n)
        assert len(ids) == n // 4 and tok.decode(ids) == char * n
    assert time.perf_counter() - start < 6  # a quadratic merge takes minutes
    assert len(tok.encode(" " * 1_100_001)) == 275_001 if engine == "tiktoken" else True


def test_lone_surrogates_are_read_as_the_replacement_character(smol):
    assert smol.encode("a\ud800b") == smol.encode("a\ufffdb")
    assert smol.encode("\ud83d\ude00") == smol.encode("😀")  # a pair is the character it spells
    assert smol.encode("a\udfff<|im_end|>", allow_special=True) == smol.encode("a\ufffd<|im_end|>", allow_special=True)


def test_tk_12_holes_in_the_id_range():
    """TK-12 (pytorch/torchtune #1995): ids are kept as declared, and an id without a token decodes to nothing."""
    vocab = {c: i for i, c in enumerate(V.ALPHABET)} | {f"x{i}": i for i in range(256, 299)} | {"end": 300}
    tok = ours(library(vocab, []))
    assert tok.vocab_size == 301 and tok.token_bytes(300) == b"end" and tok.token_bytes(298) == b"x298"
    assert tok.decode([97, 299, 98, 305, -1, 10**12, 300]) == "abend"
    assert tok.token_bytes(299) == tok.token_bytes(305) == b""


def test_decoding_equals_the_library(smol, smol_library):
    rng = random.Random(1)
    for skip in (True, False):
        for _ in range(400):
            ids = [rng.choice((rng.randrange(17), rng.randrange(17, 300), rng.randrange(49152))) for _ in range(12)]
            assert smol.decode(ids, skip_special=skip) == smol_library.decode(ids, skip_special_tokens=skip)


def test_flags_of_added_tokens_equal_the_library():
    vocab = {c: i for i, c in enumerate(V.ALPHABET)}
    theirs = library(vocab, [], "qwen2", nfc=True)
    theirs.add_tokens([AddedToken("<l>", lstrip=True, normalized=False), AddedToken("<r>", rstrip=True,
                                                                                    normalized=False),
                       AddedToken("<lr>", lstrip=True, rstrip=True, normalized=False),
                       AddedToken("<n>", normalized=True), AddedToken("<e\u0301>", normalized=True),
                       AddedToken("<raw>", normalized=False), AddedToken("<l><r>x", normalized=False)])
    tok = ours(theirs)
    rng = random.Random(2)
    atoms = ["<l>", "<r>", "<lr>", "<n>", "<e\u0301>", "<é>", "<raw>", "x", " ", "\n", "\u0338", "\u3000", "\x1c",
             "<l><r>x"]
    for _ in range(2000):
        text = "".join(rng.choices(atoms, k=rng.randint(1, 8)))
        assert tok.encode(text, allow_special=True) == theirs.encode(text).ids, repr(text)
    assert "<raw>" in tok.special and tok.special["<raw>"] not in tok.special_ids


def test_without_control_tokens_the_other_added_tokens_are_still_found():
    """As the library does with encode_special_tokens: runs of spaces and tags are vocabulary, <|im_end|> is characters,
    and nothing is looked for inside it."""
    theirs = library({c: i for i, c in enumerate(V.ALPHABET)}, [], special=["<|im_end|>", "<e>", "<think>!"])
    theirs.add_tokens([AddedToken("  ", normalized=False), AddedToken("<think>", normalized=False), AddedToken("end"),
                       AddedToken("e>", lstrip=True)])
    theirs.encode_special_tokens = True
    tok, rng = ours(theirs), random.Random(7)
    for _ in range(1500):
        text = "".join(rng.choices(["  ", " ", "<think>", "!", "<|im_end|>", "<e>", "end", "e>", "<", "x"], k=8))
        ids = tok.encode(text)
        assert ids == theirs.encode(text).ids and not set(ids) & tok.special_ids, text
    assert tok.special["<think>"] in tok.encode("<think>") and tok.encode("<think>!") == [*b"<think>!"]


def test_whitespace_that_one_token_swallows_and_another_is_equals_the_library():
    """An rstrip token swallows what is a token as well; that one is found all the same, as in the library."""
    vocab = {c: i for i, c in enumerate(V.ALPHABET)}
    theirs = library(vocab, [])
    theirs.add_tokens([AddedToken("<r>", rstrip=True, normalized=False), AddedToken("  ", normalized=False),
                       AddedToken("\n", normalized=False), AddedToken("<l>", lstrip=True, normalized=False)])
    tok, rng = ours(theirs), random.Random(8)
    assert tok.encode("<r>   x") == theirs.encode("<r>   x").ids == [256, 257, 32, 120]
    for _ in range(2000):
        text = "".join(rng.choices(["<r>", "<l>", " ", "  ", "   ", "\n", "x"], k=rng.randint(1, 8)))
        assert tok.encode(text) == theirs.encode(text).ids, repr(text)
    theirs.add_tokens([AddedToken("  !", lstrip=True, normalized=False), AddedToken(" ", lstrip=True, rstrip=True,
                                                                                    normalized=False)])
    assert isinstance(ours(theirs).encode("<r>  !   <r>  <l>  ! "), list), "where the library panics"


def test_add_prefix_space_equals_the_library():
    theirs = library({c: i for i, c in enumerate(V.ALPHABET)}, [], special=["<s>"])
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tok = ours(theirs)
    for text in ("", "a", " a", "\na", "<s>a<s> b", "\x1ca", "\u3000a"):
        assert tok.encode(text, allow_special=True) == theirs.encode(text).ids, repr(text)


# ------------------------------------------------------------------ SentencePiece in tokenizer.json

BYTES = [f"<0x{b:02X}>" for b in range(256)]
BLANKS = ["▁", "a▁b", "▁▁ ▁", " a", "a ", "  a  b   ", "\n a\n\n b", "\t\ta", "a\x00b", "<0x41> <unk> <s>", "▁a ▁b",
          "ab" * 40]
FALLBACK = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
STRIP = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                           decoders.Strip(" ", 1, 0)])
FORMS = {  # normalizer, pre-tokenizer, decoder
    "legacy": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None, STRIP),
    "gemma": (normalizers.Replace(" ", "▁"), None, FALLBACK),
    **{f"{scheme}{'-split' * split}": (None, pre_tokenizers.Metaspace("▁", scheme, split), STRIP)
       for scheme in ("always", "first", "never") for split in (False, True)},
    "metaspace": (None, pre_tokenizers.Metaspace(), decoders.Metaspace()),
    "metaspace-never": (None, pre_tokenizers.Metaspace("▁", "never"), decoders.Metaspace("▁", "never")),
}


def sp_library(vocab, merges, form="legacy", **options) -> Library:
    made = Library(models.BPE(vocab=vocab, merges=merges, **options))
    normalizer, before, made.decoder = FORMS[form]
    if normalizer is not None:
        made.normalizer = normalizer
    if before is not None:
        made.pre_tokenizer = before
    return made


def random_pieces(rng: random.Random):
    """A vocabulary of characters that training would not make: see random_vocabulary; some bytes, some of "<unk>"."""
    letters = ["▁", "a", "b"] + ["é"] * (rng.random() < 0.5)
    pool, merges = list(letters), []
    pool += ["<unk>", "<0xC3>"] * (rng.random() < 0.1)
    for _ in range(rng.randint(1, 14)):
        left, right = rng.choice(pool), rng.choice(pool)
        if len(left + right) <= 20:
            merges.append((left, right))
            pool += [left + right] * (left + right not in pool)
    rng.shuffle(merges)
    merges += rng.sample(merges, k=min(len(merges), rng.randint(0, 2)))
    spelled = rng.choice((BYTES, BYTES, [], rng.sample(BYTES, k=200)))
    unmade = ["".join(rng.choices(letters, k=rng.randint(2, 5))) for _ in range(3)]
    tokens = list(dict.fromkeys(["<unk>", *spelled, *pool, *unmade]))
    if rng.random() < 0.2 and not any("▁" in pair for pair in merges):
        tokens.remove("▁")
    return dict(zip(tokens, rng.sample(range(len(tokens)), k=len(tokens)))), merges


def sp_disagreements(cases: int, seed: int, change=lambda tok: None) -> int:
    rng, wrong = random.Random(seed), 0
    for case in range(cases):
        vocab, merges = random_pieces(rng)
        theirs = sp_library(vocab, merges, list(FORMS)[case % len(FORMS)], byte_fallback=rng.random() < 0.7,
                            unk_token=rng.choice(("<unk>", "<unk>", None)), fuse_unk=rng.random() < 0.5,
                            ignore_merges=rng.random() < 0.3)
        theirs.add_special_tokens([AddedToken("<s>", normalized=rng.random() < 0.3), AddedToken("</s>")])
        theirs.add_tokens([AddedToken("bb", normalized=rng.random() < 0.5), AddedToken("▁ a", normalized=False)])
        tok = ours(theirs)
        change(tok)
        for _ in range(15):
            text = "".join(rng.choices(["a", "a", "b", " ", " ", "▁", "é", "ü", "\n", "<s>", "</s>", "bb", "😀"],
                                       k=rng.randint(0, 12)))
            theirs.encode_special_tokens = bool(control := rng.random() < 0.5)
            wrong += tok.encode(text, allow_special=not control) != theirs.encode(text).ids
    return wrong


def test_ids_of_random_sentencepiece_vocabularies_equal_the_library():
    assert sp_disagreements(500, seed=0) == 0


@pytest.mark.slow
def test_ids_of_very_many_random_sentencepiece_vocabularies_equal_the_library():
    assert sp_disagreements(5_000, seed=1) == 0


def test_the_random_sentencepiece_vocabularies_would_catch_cuts_without_proof():
    def everywhere(tok):
        tok.cuts = [T.regex.compile("▁*[^▁]*")]

    assert sp_disagreements(150, seed=0, change=everywhere) > 10


SENTENCES = [*HARD, *BLANKS, (ROOT / "tokenizer.py").read_text()[:30_000],
             "the cat sat on the mat, then the hat. " * 20,
             "one two  three   four\n\n    five 12345 67 8 über straße naïve café 季節は巡る。 季節 " * 5]


@functools.cache
def trained(split: bool) -> tuple[dict, list]:
    """Vocabulary and merges from the library's own trainer; without `split` tokens cross spaces ("e▁t")."""
    made = Library(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = FORMS["legacy"][0]
    if split:
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always", True)
    lines = [line for text in SENTENCES for line in text.replace("\x00", "").splitlines() if len(line) < 200]
    made.train_from_iterator(lines, trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False))
    model = json.loads(made.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_trained_sentencepiece_vocabulary_equals_the_library(form, split):
    """Every spelling of Llama 2's, TinyLlama's and Mistral's tokenizer.json, on the hard corpus: ids, and text back."""
    vocab, merges = trained(split)
    theirs = sp_library(vocab, merges, form, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    theirs.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    theirs.add_tokens([AddedToken("[X]", normalized=False), AddedToken("      ", normalized=False)])
    tok = ours(theirs)
    crossing = {text for text in vocab if "▁" in text.lstrip("▁")}
    assert bool(crossing) is not split and "<0x00>" in vocab
    for text in [*SENTENCES, *corpus(21, 400), *map(str.upper, HARD)]:
        for control in (True, False):
            text = text.replace("漢", "<s>").replace("Z", "[X]")
            theirs.encode_special_tokens = not control
            ids = theirs.encode(text).ids
            assert tok.encode(text, allow_special=control) == ids, repr(text)
            for skip in (True, False):
                assert tok.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("form", ["legacy", "first", "metaspace", "gemma"])
def test_decoding_any_ids_equals_the_library(form):
    """Up to the number of U+FFFD: for a run of byte tokens that is not UTF-8 the library writes one for each byte, good
    or bad, which no stream could do, and we write what is good."""
    vocab, merges = trained(True)
    theirs = sp_library(vocab, merges, form, byte_fallback=True, unk_token="<unk>")
    theirs.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    theirs.add_tokens(["[▁X]"])
    tok, rng = ours(theirs), random.Random(6)
    plain = [i for t, i in vocab.items() if not t.startswith("<0x")] + [vocab[b] for b in BYTES[:128]] * 2
    assert tok.special["[▁X]"] == 900
    for _ in range(2000):
        ids = rng.choices([*plain, 900, 10**6], k=rng.randint(0, 6))
        for skip in (True, False):
            assert tok.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip), ids
    euro = [vocab[f"<0x{b:02X}>"] for b in "a€".encode()]
    assert form == "metaspace" or tok.decode([*euro, euro[1], vocab["a"]]) == "a€\ufffda"


def test_tk_12_holes_in_a_sentencepiece_vocabulary():
    """TK-12 (pytorch/torchtune #1995): ids as declared; a hole is nothing, also in front of the dummy prefix."""
    tok = ours(sp_library({"▁": 0, "a": 3, "▁a": 7, **{b: 10 + i for i, b in enumerate(BYTES)}}, [("▁", "a")],
                          byte_fallback=True))
    assert tok.vocab_size == 266 and tok.encode("a é") == [7, 0, 10 + 0xC3, 10 + 0xA9]
    assert tok.decode([5, 10**9, -1, 7, 5, 7]) == "a a" and tok.token_bytes(5) == tok.token_bytes(5, first=True) == b""
    assert (tok.token_bytes(7), tok.token_bytes(7, first=True)) == (b" a", b"a")


LLAMA2 = ("{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
          "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}")


def template_of(front=None, back=None) -> dict:
    single = [{"SpecialToken": {"id": t, "type_id": 0}} if t else {"Sequence": {"id": "A", "type_id": 0}}
              for t in (front, "", back) if t is not None]
    return {"type": "TemplateProcessing", "single": single, "pair": single,
            "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for i, t in enumerate(("<s>", "</s>"), 1)}}


def llama2(post=None, **config) -> tuple[Tokenizer, Library]:
    vocab, merges = trained(True)
    theirs = sp_library(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    theirs.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    data = {**json.loads(theirs.to_str()), "post_processor": post or template_of("<s>")}
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>", "chat_template": LLAMA2,
              **config}
    return from_json(data, config), Library.from_str(json.dumps(data))


def test_tk_13_a_llama_2_template_that_writes_bos_itself():
    """TK-13 (vllm-project/vllm #27486): Llama 2's template writes <s>, and its tokenizer adds one: one comes."""
    tok, theirs = llama2()
    assert (tok.bos_id, tok.eos_ids, tok.add_bos, tok.add_eos) == (1, [2], True, False)
    assert tok.names == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    messages = [{"role": "user", "content": "the cat </s> <s>"}]
    ids = ChatTemplate(tok.chat_template).encode(messages, tok)
    assert ids.count(1) == 1 and ids[0] == 1 and 2 not in ids and tok.decode(ids) == "[INST] the cat </s> <s> [/INST]"
    text = "[INST] the cat [/INST] sat </s>"
    assert tok.encode("<s>" + text, allow_special=True) == theirs.encode(text).ids
    assert theirs.encode("<s>" + text).ids[:2] == [1, 1], "the library has it twice"


def test_tk_17_long_runs_of_characters():
    """TK-17 (openai/tiktoken #195, #245, #391): a text without any place to cut is one piece of 200,000 symbols."""
    vocab, merges = {"▁": 0, "a": 1, "aa": 2, "aaaa": 3, "▁▁": 4, **{b: 5 + i for i, b in enumerate(BYTES)}}, [
        ("a", "a"), ("aa", "aa"), ("▁", "▁")]
    listed = ours(sp_library(vocab, merges, "never", byte_fallback=True))
    scored = from_gguf({f"tokenizer.ggml.{k}": v for k, v in {
        "model": "llama", "tokens": list(vocab), "scores": [-1.0] * len(vocab), "token_type": [1] * 5 + [6] * 256,
        "add_space_prefix": False, "add_bos_token": False}.items()})
    start = time.perf_counter()
    for tok in (listed, scored):
        assert tok.encode("^" * 200_000) == [5 + 94] * 200_000
        assert tok.encode("a" * 32_000) == [3] * 8000 and tok.encode(" " * 100_000) == [4] * 50_000
    assert time.perf_counter() - start < 10  # a quadratic merge takes minutes


def test_a_megabyte_of_sentencepiece_takes_a_few_seconds():
    tok, theirs = llama2()
    text = "".join(random.Random(0).choices([*SENTENCES[-2:], *corpus(8, 300)], k=4000))[:1_000_000]
    start = time.perf_counter()
    ids = tok.encode(text)
    assert time.perf_counter() - start < 20 and ids == theirs.encode(text).ids


# ------------------------------------------------------------------ SentencePiece with scores

def sp_model(tmp_path, lines=None, **options):
    """(bytes of a tokenizer.model made by sentencepiece's own trainer, its processor)"""
    sentencepiece = pytest.importorskip("sentencepiece")
    options = {"vocab_size": 700, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
               "remove_extra_whitespaces": False, "user_defined_symbols": ["<sep>", "▁▁", "ab▁c", "<sep>s"],
               "character_coverage": 0.98, "hard_vocab_limit": False, "minloglevel": 2, **options}
    lines = lines or [line for text in SENTENCES for line in text.replace("\x00", "").splitlines() if len(line) < 200]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_prefix=str(tmp_path / "m"), **options)
    data = (tmp_path / "m.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(data)
    return data, sentencepiece.SentencePieceProcessor(model_proto=data)


def as_metadata(sp) -> dict:
    kinds = [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in range(len(sp))]
    pieces = [sp.id_to_piece(i) for i in range(len(sp))]
    kinds = [4 if piece in ("<sep>", "▁▁", "ab▁c", "<sep>s") else kind for piece, kind in zip(pieces, kinds)]
    data = {"model": "llama", "pre": "default", "tokens": pieces, "token_type": kinds, "bos_token_id": 1,
            "eos_token_id": 2, "scores": [sp.get_score(i) for i in range(len(sp))]}
    return {f"tokenizer.ggml.{key}": value for key, value in data.items()}


SYMBOLS = ["a<sep>b", "<sep>", " <sep> <sep>s ", "   ab c  ab  c", "ab cab c", "<s>a</s>", "x▁▁▁y"]


@pytest.mark.parametrize("options", [
    {}, {"add_dummy_prefix": False}, {"remove_extra_whitespaces": True, "user_defined_symbols": ["<sep>"]},
    {"byte_fallback": False}, {"split_by_whitespace": False, "max_sentencepiece_length": 8}, {"split_digits": True},
    {"allow_whitespace_only_pieces": True, "user_defined_symbols": []}], ids=str)
def test_a_tokenizer_model_equals_sentencepiece(tmp_path, options):
    """Ids and text for what its own trainer makes; and the same vocabulary in GGUF's form gives the same ids."""
    _, sp = sp_model(tmp_path, **options)
    tok = from_folder(tmp_path)
    assert (tok.bos_id, tok.eos_ids, tok.add_bos, tok.add_eos, tok.vocab_size) == (1, [2], True, False, len(sp))
    assert tok.names == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    toks = [tok]
    if options.get("user_defined_symbols", True):
        toks.append(from_gguf({
            **as_metadata(sp), "tokenizer.ggml.add_space_prefix": "add_dummy_prefix" not in options,
            "tokenizer.ggml.remove_extra_whitespaces": "remove_extra_whitespaces" in options}))
    for text in [*SENTENCES, *SYMBOLS, *corpus(22, 500), *map(str.title, HARD)]:
        text = text.replace("漢", "<sep>").replace("季", "  ").encode("utf-8", "replace").decode()
        ids = sp.encode(text)
        for each in toks:
            assert each.encode(text, bos=False) == ids, repr(text)
            shown = each.decode(ids).lstrip(" " if "remove_extra_whitespaces" in options else "")  # of "▁" in a text
            assert sp.unk_id() in ids or shown == sp.decode(ids)
    assert tok.encode("hi") == [1, *sp.encode("hi")]


def varint(n: int) -> bytes:
    n &= (1 << 64) - 1
    return bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])


def field(number: int, value) -> bytes:
    """One field of a protobuf message, by its Python type."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def proto(pieces, trainer: dict, normalizer: dict) -> bytes:
    """A tokenizer.model written out: pieces (text, score, kind), the other two by field number."""
    def message(fields: dict) -> bytes:
        return b"".join(field(number, value) for number, value in fields.items())

    return b"".join(field(1, message({1: t, 2: float(score), 3: kind})) for t, score, kind in pieces) + field(
        2, message(trainer)) + field(3, message(normalizer))


BPE_MODEL = {3: 2, 35: 1}  # model_type, byte_fallback
AS_IS = {1: "identity", 3: 1, 4: 0, 5: 1}  # add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces


def random_scored(rng: random.Random) -> list[tuple[str, float, int]]:
    """Pieces that no trainer would make: equal scores, parts that are no pieces, symbols that overlap, dead ends."""
    texts = list(dict.fromkeys("".join(rng.choices("▁aabbé", k=rng.randint(1, 6))) for _ in range(rng.randint(3, 25))))
    symbols = list(dict.fromkeys("".join(rng.choices("▁ab", k=rng.randint(1, 3))) for _ in range(rng.randint(0, 2))))
    spelled = BYTES * (rng.random() < 0.7)
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((t, 0.0, 6) for t in spelled),
              *((t, 0.0, 4) for t in symbols), ("unused", 0.0, 5)]
    return pieces + [(t, float(rng.randint(-6, 2)), 1) for t in dict.fromkeys([*texts, "▁"]) if t not in symbols]


def textbook_sentencepiece(text: str, pieces) -> list[int]:
    """SentencePiece's BPE by its definition, without any haste."""
    kinds = {kind: {t: i for i, (t, _, k) in enumerate(pieces) if k == kind} for kind in range(1, 7)}
    text, parts = "▁" + text.replace(" ", "▁") if text else "", []
    while text:
        symbol = max((s for s in kinds[4] if text.startswith(s)), key=len, default="")
        parts.append((symbol or text[0], bool(symbol)))
        text = text[len(parts[-1][0]):]
    while ranked := [(-pieces[kinds[1][a + b]][1], i) for i, ((a, frozen), (b, cold)) in enumerate(
            itertools.pairwise(parts)) if not frozen and not cold and a + b in kinds[1]]:
        _, i = min(ranked)
        parts[i:i + 2] = [(parts[i][0] + parts[i + 1][0], False)]
    ids = []
    for part, _ in parts:
        if (id := kinds[1].get(part, kinds[4].get(part))) is not None:
            ids.append(id)
        elif kinds[6]:
            ids += [kinds[6][f"<0x{b:02X}>"] for b in part.encode()]
        elif ids[-1:] != [0]:  # a row of unknown characters is one
            ids.append(0)
    return ids


def sentencepiece_of(data: bytes):
    """sentencepiece's own processor, or None where the package is not installed."""
    try:
        import sentencepiece
    except ImportError:
        return None
    return sentencepiece.SentencePieceProcessor(model_proto=data)


def scored_disagreements(cases: int, seed: int, change=lambda pieces: pieces) -> int:
    """Texts on which ours differs from the textbook, which never differs from sentencepiece."""
    rng, wrong = random.Random(seed), 0
    for _ in range(cases):
        pieces = random_scored(rng)
        trainer = {**BPE_MODEL, 35: int(any(kind == 6 for _, _, kind in pieces))}
        tok = Tokenizer(**V._from_protobuf(proto(change(pieces), trainer, AS_IS), {}))
        sp = sentencepiece_of(proto(pieces, trainer, AS_IS))
        for _ in range(12):
            text = "".join(rng.choices(["a", "a", "b", "b", " ", "▁", "é", "ü", "\n"], k=rng.randint(0, 14)))
            ids = textbook_sentencepiece(text, pieces)
            assert sp is None or sp.encode(text) == ids, (pieces, text)
            wrong += tok.encode(text, bos=False) != ids
    return wrong

def test_ids_of_random_scores_equal_the_textbook_and_sentencepiece():
    assert scored_disagreements(250, seed=0) == 0


@pytest.mark.slow
def test_ids_of_very_many_random_scores_equal_the_textbook_and_sentencepiece():
    assert scored_disagreements(2_500, seed=1) == 0


@pytest.mark.parametrize("change", [
    lambda pieces: [(t, s + i / 1e3, k) for i, (t, s, k) in enumerate(pieces)],  # no two scores are equal
    lambda pieces: [(t, s, 1 if k == 4 else k) for t, s, k in pieces],  # user-defined symbols merge like others
    lambda pieces: [(t, -s, k) for t, s, k in pieces]])
def test_the_random_scores_would_catch_another_rule(change):
    assert scored_disagreements(120, seed=0, change=change) > 3


def test_a_table_restores_characters_once_control_tokens_are_found():
    tok = toy(["< |"])
    disguised, table, end = "a\ue000|im_end|>\ue001<|im_end|>", {0xE000: "<", 0xE001: "b"}, tok.special["<|im_end|>"]
    assert tok.encode(disguised, allow_special=True, restore=table) == [97, 256, *b"im_end|>b", end]
    assert tok.encode(disguised, restore=table) == tok.encode(disguised.translate(table))
