"""stream.py: text that is shown piece by piece equals the whole, and nothing is ever taken back."""
import random
import time

import pytest
from test_tokenizer import from_gguf, library, ours, toy

from stream import StreamDecoder
from tokenizer import Tokenizer
from vocab import ALPHABET


def bytes_tokenizer(*pieces: str) -> tuple[Tokenizer, dict[str, int]]:
    """256 bytes, the given pieces as tokens of their own, <|im_end|>."""
    vocab = {c: i for i, c in enumerate(ALPHABET)}
    for piece in pieces:
        vocab.setdefault("".join(ALPHABET[b] for b in piece.encode()), len(vocab))
    tok = ours(library(vocab, [], special=["<|im_end|>"]))
    return tok, {piece: vocab["".join(ALPHABET[b] for b in piece.encode())] for piece in pieces}


def deltas(tok: Tokenizer, ids, **options) -> tuple[list[str], StreamDecoder]:
    stream = StreamDecoder(tok, **options)
    out = [stream.push(i) for i in ids]
    out.append(stream.finish())
    assert "".join(out) == stream.text and stream.finish() == "" and stream.text == "".join(out)
    return out, stream


def test_d01_a_character_split_over_tokens_arrives_whole():
    """D01 (exo-explore/exo PR #1691, turboderp-org/exllamav3 #171): bytes wait until their character is complete."""
    tok = toy()
    ids = [0xF0, 0x9F, 0x98, 0x80, 0xD0, 0xB6, 97]
    out, stream = deltas(tok, ids)
    assert out == ["", "", "", "😀", "", "ж", "a", ""] and stream.text == tok.decode(ids)


def test_d11_an_incomplete_character_at_the_end():
    """D11 (Blaizzy/mlx-vlm #1771): the rest is U+FFFD as in decode(), never an exception, never flushed at a space."""
    tok, piece = bytes_tokenizer(" b")
    b = piece[" b"]
    for ids, expected in (([97, 0xE2, 0x82], ["a", "", "", "\ufffd"]), ([0xE2, 0x82, 0xAC, b], ["", "", "€", " b", ""]),
                          ([0xE2, 0x82, b], ["", "", "\ufffd b", ""]), ([0xFF, 97, 0xC3], ["\ufffd", "a", "",
                                                                                           "\ufffd"])):
        out, stream = deltas(tok, ids)
        assert out == expected and stream.text == tok.decode(ids)


@pytest.mark.parametrize("stop, pieces, text", [
    ("klmnopq", ["klm", "n", "op", "q"], ""), ("\nQ2:", ["ok", "\nQ2", ":", " hi"], "ok"), (" 7 8 9", ["6 7 8 9 0"],
                                                                                            "6"),
    ("aab", ["aa", "a", "ab", "c"], "aa"), ("abab", ["aba", "cab", "ab"], "abac"), ("é!", ["caf", "é", "!"], "caf"),
])
def test_d03_a_stop_string_spread_over_tokens(stop, pieces, text):
    """D03 (vllm-project/vllm #3574, ggml-org/llama.cpp #11538): found wherever it falls; no part of it is shown."""
    tok, ids = bytes_tokenizer(*pieces)
    out, stream = deltas(tok, [ids[p] for p in pieces], stop=[stop])
    assert stream.stopped and stream.text == text and "".join(out) == text


@pytest.mark.parametrize("stop, pieces, text, stopped", [
    ("four\nXX", ["two ", "three ", "four"], "two three four", False), ("\n", ["Rome", ".\n"], "Rome.", True),
    ("Bob:", [" Bob", "?"], " Bob?", False), ("Bob:", [" Bob"], " Bob", False),
])
def test_d07_held_back_text_is_shown_at_the_end(stop, pieces, text, stopped):
    """D07 (ggml-org/llama.cpp PRs #15007, #9867): what waited for a stop string comes out, exactly once."""
    tok, ids = bytes_tokenizer(*pieces)
    _, stream = deltas(tok, [ids[p] for p in pieces], stop=[stop])
    assert (stream.text, stream.stopped) == (text, stopped)


def test_d12_a_stop_string_that_is_a_control_token():
    """D12 (vllm-project/vllm #2123): its id stops, though control tokens are no text; spelled out it stops too."""
    tok = toy()
    end = tok.special["<|im_end|>"]
    out, stream = deltas(tok, [97, end, 98], stop=["<|im_end|>"])
    assert (out, stream.stopped, stream.stop_ids) == (["a", "", "", ""], True, {end})
    _, stream = deltas(tok, [97, *b"<|im_end|>", 98], stop=["<|im_end|>"])
    assert (stream.text, stream.stopped) == ("a", True)
    out, stream = deltas(tok, [97, end, 98])
    assert (stream.text, stream.stopped) == ("ab", False)
    _, stream = deltas(tok, [*b"xST", 0xE2, end], stop=["<|im_end|>", "STOP"])
    assert (stream.text, stream.stopped) == ("xST\ufffd", True)
    _, stream = deltas(tok, [97, end, 98], skip_special=False)
    assert stream.text == "a<|im_end|>b"


def test_d15_each_request_has_its_own_state():
    """D15 (waybarrios/vllm-mlx PRs #109, #195): nothing of one stream shows up in another."""
    tok = toy()
    left = StreamDecoder(tok, stop=["xyz"])
    left.push(0xF0), left.push(0x9F)  # aborted here
    assert deltas(tok, b"ok")[1].text == "ok"
    streams = [StreamDecoder(tok), StreamDecoder(tok)]
    out = [[s.push(b[i]) for s, b in zip(streams, ("😀".encode(), "🙂".encode()))] for i in range(4)]
    assert out[-1] == ["😀", "🙂"] and out[:3] == [["", ""]] * 3


def test_d09_spaces_are_kept_and_a_character_of_the_prompt_is_completed():
    """D09 (huggingface/transformers #22710): byte-level tokens carry their own spaces, first or not; what continues a
    prompt is decode(prompt + output) minus decode(prompt)."""
    tok, ids = bytes_tokenizer(" Hello", " world", "  two")
    assert deltas(tok, [ids[" Hello"], ids[" world"]], prompt_ids=[97])[0] == [" Hello", " world", ""]
    assert deltas(tok, [ids["  two"]])[0] == ["  two", ""]
    assert deltas(tok, [0x98, 0x80, 97], prompt_ids=[*b"abc", 0xF0, 0x9F])[0] == ["", "😀", "a", ""]
    assert deltas(tok, [97], prompt_ids=[])[0] == ["a", ""]
    for nothing in ([], [999], [tok.special["<|im_end|>"]]):
        assert deltas(tok, nothing, prompt_ids=[97, 0xF0, 0x9F])[1].text == "", "the prompt's character is not ours"


def pieces_tokenizer() -> tuple[Tokenizer, dict[str, int]]:
    """A SentencePiece vocabulary in GGUF's form."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁Hello", "▁▁", "o", "[X]"]
    data = {"model": "llama", "tokens": texts, "scores": [-float(i) for i in range(len(texts))],
            "token_type": [2, 3, 3] + [6] * 256 + [1] * 4 + [4]}
    return from_gguf({f"tokenizer.ggml.{k}": v for k, v in data.items()}), {t: i for i, t in enumerate(texts)}


def test_d09_the_dummy_prefix_is_not_shown_at_the_beginning_only():
    """D09 (huggingface/transformers #22710): the space of a first word is SentencePiece's own at the beginning of all
    text, and text after a prompt; control tokens, as in front of every prompt, are no text."""
    tok, ids = pieces_tokenizer()
    hello, bos = ids["▁Hello"], ids["<s>"]
    for prompt, shown in (([], "Hello"), ([bos], "Hello"), ([bos, ids["o"]], " Hello"), ([10**6, bos], "Hello"),
                          ([ids["o"], bos, 10**6], " Hello"), ([ids["▁"]], " Hello"), ([ids["<0xE2>"]], " Hello")):
        assert deltas(tok, [hello, hello], prompt_ids=prompt)[0] == [
            shown if prompt != [ids["<0xE2>"]] else "\ufffd Hello", " Hello", ""]
    assert deltas(tok, [bos, 10**6, hello])[0] == ["", "", "Hello", ""]
    assert deltas(tok, [bos, hello], skip_special=False)[0] == ["<s>", " Hello", ""]
    assert deltas(tok, [ids["▁"], hello])[0] == ["", " Hello", ""]


def test_a_sentencepiece_stream_is_decode_of_all_minus_decode_of_the_prompt():
    """Of the prompt's text without its incomplete last character; an answer without bytes is no text."""
    tok, ids = pieces_tokenizer()
    rng = random.Random(8)
    choices = [10**6, *(ids[t] for t in ("<s>", "▁", "▁Hello", "▁▁", "o", "[X]", "<0xE2>", "<0x82>", "<0xAC>"))]
    for _ in range(3000):
        prompt, answer = (rng.choices(choices, k=rng.randint(0, 5)) for _ in range(2))
        assert deltas(tok, answer)[1].text == tok.decode(answer)
        whole, before = tok.decode(prompt + answer), tok.decode(prompt)
        begun = b"".join(tok.token_bytes(i) for i in prompt if i not in tok.special_ids)
        if begun.endswith((b"\xe2", b"\xe2\x82", b"\xe2\xac")):
            before = before[:-1]
        expected = whole[len(before):] if any(map(tok.token_bytes, set(answer) - tok.special_ids)) else ""
        assert deltas(tok, answer, prompt_ids=prompt)[1].text == expected and whole.startswith(before), (prompt, answer)


def reference_text(text: str, stops: list[str]) -> str:
    """The rule by brute force: the first end of any stop string; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        if found := [s for s in stops if text[:end].endswith(s)]:
            return text[:end - max(map(len, found))]
    return text


def test_streams_at_random():
    """Sum of deltas = final text = brute force, whatever the pieces; nothing shown is ever beyond the final text; and
    without stop strings it is what decode() says."""
    tok, ids = bytes_tokenizer("ab", "aba", "b€", "ba b", "\nQ")
    rng = random.Random(4)
    choices = [*ids.values(), *b"aab\n ", *"€".encode(), *"😀".encode(), 0xFF, tok.special["<|im_end|>"], 999]
    for _ in range(3000):
        answer = rng.choices(choices, k=rng.randint(0, 14))
        assert deltas(tok, answer)[1].text == tok.decode(answer)
        stops = ["".join(rng.choices("ab€\n", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        stream, shown, whole = StreamDecoder(tok, stop=stops), "", reference_text(tok.decode(answer), stops)
        for i in answer:
            shown += stream.push(i)
            assert whole.startswith(shown) and "\ufffd" not in shown.replace("\ufffd", "", whole.count("\ufffd"))
        assert shown + stream.finish() == whole == stream.text
        assert stream.stopped == (whole != tok.decode(answer))


@pytest.mark.parametrize("stop", ["END", [""], [5], [None]])
def test_stop_must_be_a_list_of_texts(stop):
    with pytest.raises(ValueError, match="stop"):
        StreamDecoder(toy(), stop=stop)


def test_a_long_stop_string_is_not_slow():
    tok, stop = toy(), "ab" * 20_000
    start = time.perf_counter()
    _, stream = deltas(tok, b"ab" * 19_999 + b"b", stop=[stop])
    assert stream.text == "ab" * 19_999 + "b" and time.perf_counter() - start < 5
