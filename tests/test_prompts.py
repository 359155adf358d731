"""prompts.py: any file of prompts is read to its end, and a run that is killed and resumed answers each line once."""
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import prompts
from prompts import Line, Results, fingerprint, head, read_prompts

ROOT = Path(__file__).resolve().parent.parent
GOOD = [
    {"prompt": "Why is the sky blue?", "id": "sky", "max_tokens": 100, "temperature": 0.7, "at": 1.5},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wé? 😀"}], "n": 2,
     "seed": 1},
    {"prompt_ids": [1, 17, 4], "logit_bias": {"17": -5}, "id": 70, "stop": ["\n", "END"], "top_k": -1},
    {"prompt": "", "raw": True, "ignore_eos": True, "min_tokens": 3, "logprobs": 0, "priority": -2, "top_p": 1,
     "regex": "a+"},
    {"prompt": "line\u2028separator \\u0041 \0", "system": "s", "min_p": 0.1, "repetition_penalty": 2, "stop": "x",
     "presence_penalty": 0.5, "frequency_penalty": -1.5, "json_schema": {"b": "é", "a": {}}},
]


def lines(tmp_path, data, name="p.jsonl"):
    data = data if isinstance(data, bytes) else data.encode()
    (tmp_path / name).write_bytes(data)
    return list(read_prompts(tmp_path / name))


def one(tmp_path, data) -> Line:
    line, = lines(tmp_path, data)
    return line


# ------------------------------------------------------------------ reading


def test_a_jsonl_file(tmp_path):
    found = lines(tmp_path, "\n".join(json.dumps(item) for item in GOOD))
    assert [line.error for line in found] == [None] * 5
    assert [line.id for line in found] == ["sky", 2, 70, 4, 5] and [line.number for line in found] == [1, 2, 3, 4, 5]
    assert [line.at for line in found] == [1.5, 0, 0, 0, 0]
    assert [line.prompt for line in found] == [next(item[k] for k in prompts.PROMPTS if k in item) for item in GOOD]
    assert found[0].options == {"max_tokens": 100, "temperature": 0.7}
    assert found[2].options == {"logit_bias": {17: -5.0}, "stop": ["\n", "END"], "top_k": -1}
    assert found[4].options == {"system": "s", "min_p": 0.1, "repetition_penalty": 2.0, "stop": ["x"],
                                "presence_penalty": 0.5, "frequency_penalty": -1.5,
                                "json_schema": '{"b":"\\u00e9","a":{}}'}
    assert set().union(*(line.options for line in found)) == set(prompts.OPTIONS), "every option is seen here"
    raw = "\n".join(json.dumps(item, ensure_ascii=False) for item in GOOD)
    assert lines(tmp_path, raw) == lines(tmp_path, raw, "by_its_first_line.txt") == found


def test_a_text_file(tmp_path):
    found = lines(tmp_path, "\ufeffone \r\n\r\n \t\n  {\"two\": é\u2028\x85}\n3", "p.txt")
    assert found == [Line(1, 1, "one ", {}), Line(4, 4, "  {\"two\": é\u2028\x85}", {}), Line(5, 5, "3", {})]
    for nothing in ("", "\n\r\n", "\ufeff", "\ufeff\n \n"):
        assert lines(tmp_path, nothing, "p.txt") == lines(tmp_path, nothing) == []


def test_the_kind_is_decided_once_a_file(tmp_path):
    item = '{"prompt": "a"}'
    assert [x.prompt for x in lines(tmp_path, f"\n \n{item}\n{item}", "p.txt")] == ["a", "a"]
    assert [x.prompt for x in lines(tmp_path, f"\ufeff{item}\r\nhello\r\n", "p.txt")] == ["a", None], "JSONL to its end"
    assert [x.prompt for x in lines(tmp_path, f"hello\n{item}", "p.txt")] == ["hello", item], "text to its end"
    for first in ('["a"]', '"a"', "5", "null", '{"prompt": "a"', "[" * 100_000):
        assert lines(tmp_path, f"{first}\n{item}", "p.txt")[1].prompt == item
        assert lines(tmp_path, f"{first}\n{item}", "P.JSONL")[1].prompt == "a"
    assert one(tmp_path, '{"prompt": NaN}').error and lines(tmp_path, '{"prompt": NaN}', "p.txt")[0].error


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{"prompt": "b"}')))
    assert [line.prompt for line in read_prompts("-")] == ["a", "b"]
    assert not sys.stdin.buffer.closed, "it is not ours to close"


def test_what_cannot_be_opened(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match=r"cannot be read: .*; give a file of prompts"):
            read_prompts(path)  # at once, not at the first line


BROKEN = [
    ("{", "not JSON: Expecting property name"), ("hello", "not JSON"), ("5", "5 is no JSON object"),
    ("[1]", r"\[1\] is no JSON object"), ("{}", "no prompt; give one of prompt, messages, prompt_ids"),
    ('{"prompt": null}', "no prompt"), ('{"prompt": "a", "prompt_ids": [1]}', "prompt and prompt_ids; give one"),
    ('{"prompt": "a", "promt": 1}', "unknown key 'promt'; known are prompt, "), ('{"prompt": 5}', '"prompt" is 5, but'),
    ('{"prompt": "a", "x": null}', "unknown key 'x'"), ('{"prompt": "a", "prompt": "b"}', "a key comes twice"),
    ('{"prompt": ["a"]}', r"\"prompt\" is \['a'\], but must be a text"), ('{"messages": []}', "but must be a list of"),
    ('{"messages": [{"role": "user"}]}', '"messages" is'), ('{"messages": [["role", "content"]]}', '"messages" is'),
    ('{"messages": [{"role": "user", "content": "a", "name": "b"}]}', '"messages" is'),
    ('{"messages": [{"role": "user", "content": ["a"]}]}', '"messages" is'), ('{"messages": "a"}', '"messages" is'),
    ('{"prompt_ids": []}', "a list of token ids, at least one"), ('{"prompt_ids": [1, true]}', '"prompt_ids" is'),
    ('{"prompt_ids": [1.0]}', '"prompt_ids" is'), ('{"prompt_ids": [-1]}', '"prompt_ids" is'),
    ('{"prompt": "a", "at": -0.1}', '"at" is -0.1'), ('{"prompt": "a", "at": NaN}', "NaN is no JSON"),
    ('{"prompt": "a", "at": -Infinity}', "-Infinity is no JSON"), ('{"prompt": "a", "at": 1e999}', '"at" is inf'),
    ('{"prompt": "a", "at": "1"}', "\"at\" is '1'"), ('{"prompt": "a", "at": true}', '"at" is True'),
    ('{"prompt": "a", "at": 1' + "0" * 900 + "}", '"at" is 100'),
    ('{"prompt": "a", "seed": 1.5}', '"seed" is 1.5, but'),
    ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "a number of 5,000 digits"),
    ('{"prompt": "a", "max_tokens": -1}', "a whole number, at least 0"), ('{"prompt": "a", "n": 0}', '"n" is 0'),
    ('{"prompt": "a", "n": true}', '"n" is True'), ('{"prompt": "a", "raw": 1}', "must be true or false"),
    ('{"prompt": "a", "temperature": "hot"}', "must be a finite number"), ('{"prompt": "a", "top_p": 1e999}', "top_p"),
    ('{"prompt": "a", "stop": ""}', '"stop" is'), ('{"prompt": "a", "stop": ["a", ""]}', '"stop" is'),
    ('{"prompt": "a", "json_schema": "{}"}', "must be an object"),
    ('{"prompt": "a", "json_schema": []}', '"json_schema" is'),
    ('{"prompt": "a", "regex": 1}', '"regex" is 1, but must be a text'),
    ('{"prompt": "a", "stop": 5}', '"stop" is 5'), ('{"prompt": "a", "logit_bias": [1]}', '"logit_bias" is'),
    ('{"prompt": "a", "logit_bias": {"-1": 1}}', '"logit_bias" is'),
    ('{"prompt": "a", "logit_bias": {"²": 1}}', '"logit_bias" is'),
    ('{"prompt": "a", "logit_bias": {"1": "1"}}', '"logit_bias" is'),
    ('{"prompt": "a", "logit_bias": {"' + "9" * 5000 + '": 1}}', '"logit_bias" is .*, but must be an object'),
    ('{"prompt": "a", "logit_bias": {"1": 1, "01": 2}}', "a token id twice"),
    ('{"prompt_ids": [1], "system": "s"}', '"system" goes with "prompt" only, not with "prompt_ids"'),
    ('{"messages": [{"role": "user", "content": "a"}], "raw": true}', '"raw" goes with "prompt" only'),
    ('{"prompt": "a", "raw": true, "system": "s"}', "needs the chat template"), ('{"prompt": "\\ud83d"}', "surrogate"),
    ('{"prompt": "a", "\\udc00": 1}', "surrogate"), ('{"prompt": "a", "id": 1.5}', '"id" is 1.5'),
    ('{"prompt": "a", "id": true}', '"id" is True'), ('{"prompt": "a", "id": [1]}', r'"id" is \[1\]'),
    ('{"prompt": "a", "id": "' + "x" * 501 + '"}', "at most 500 characters"), ("[" * 100_000, "nested too deeply"),
    ('{"prompt": ' * 100_000, "nested too deeply"), ('{"prompt": ' + "[" * 900 + "]" * 900 + "}", '"prompt" is'),
    ("[" * 900 + "]" * 900, "no JSON object"), ('{"prompt": "a\nb"}', "not JSON"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_line_is_named_and_the_next_one_is_read(tmp_path, text, message):
    import re

    good = '{"prompt": "good"}'
    found = lines(tmp_path, f"{good}\n{text}\n{good}\n")
    assert found[0].prompt == found[-1].prompt == "good" and len(found) == 3 + text.count("\n")
    for line in found[1:-1]:
        assert (line.prompt, line.options, line.at) == (None, {}, 0) and line.error.startswith(f"line {line.number}: ")
        assert len(line.error) < 600 and line.error.encode(), "it can be written, and is no page"
    assert re.search(message, found[1].error), found[1].error


def test_what_json_allows_is_taken(tmp_path):
    seed = "-1" + "0" * 500
    line = one(tmp_path, f'{{"prompt": "\\ud83d\\ude00 \\u0000", "seed": {seed}, "at": 0, "stop": [], "n": null}}')
    assert line.prompt == "😀 \0" and line.options == {"seed": -(10**500), "stop": []} and line.error is None
    assert one(tmp_path, '{"messages": [{"role": "user", "content": "a"}], "raw": false}').error is None


def test_bytes_that_are_no_utf_8(tmp_path):
    for name in ("p.txt", "p.jsonl"):
        data = [b'{"prompt": "a"}', b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "b"}']
        found = lines(tmp_path, b"\n".join(data), name)
        assert [line.prompt for line in found] == ["a", None, None, "b"]
        assert found[1].error == "line 2: not UTF-8 at byte 13"
    assert lines(tmp_path, b"a\n\xff\nb", "p.txt")[1] == Line(2, 2, None, {}, error="line 2: not UTF-8 at byte 1")


def test_ids(tmp_path):
    """An id comes once; a line without one has its number, unless that is taken; a broken line keeps its own."""
    rows = [('{"prompt": "a", "id": 3}', 3, None), ('{"prompt": "a", "id": "3"}', "3", None),
            ('{"prompt": "a"}', None, "id 3, its number, is that of line 1 already"), ('{"prompt": "a"}', 4, None),
            ('{"prompt": "a", "id": 4}', None, "id 4 is that of line 4 already"),
            ('{"prompt": 5, "id": "b"}', "b", '"prompt" is 5'),
            ('{"prompt": "a", "id": "b"}', None, "id 'b' is that of"),
            ('{"prompt": "a", "x": 1, "id": "c"}', "c", "unknown key 'x'"), ("{", None, "not JSON"),
            ('{"prompt": "a", "id": 9, "seed": null}', 9, None), ('{"x": 1}', 11, "unknown key")]
    found = lines(tmp_path, "\n".join(row[0] for row in rows))
    for line, (text, own, message) in zip(found, rows):
        assert (line.id, line.error is None) == (own, message is None) and (message or "") in (line.error or ""), text
    known = [line.id for line in found if line.id is not None]
    assert len(known) == len(set(known))


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_line_that_is_too_long_is_passed_over(tmp_path, monkeypatch, end):
    monkeypatch.setattr(prompts, "MOST_BYTES", 64)
    for n in (0, 1, 63, 64, 65, 66, 67, 127, 128, 129, 130, 131, 1000):
        found = lines(tmp_path, "a\n" + "x" * n + end + ("b" if end else ""), "p.txt")
        middle = [] if n == 0 else [Line(2, 2, "x" * n, {})] if n <= 64 else [
            Line(2, 2, None, {}, error="line 2: longer than 64 bytes")]
        assert found == [Line(1, 1, "a", {}), *middle, *([Line(3, 3, "b", {})] if end else [])], n
    long, good = lines(tmp_path, '{"prompt": "' + "x" * 99 + '"}\n{"prompt": "a"}')
    assert long.error and good.prompt == "a"


def test_memory_and_time_of_long_lines(tmp_path):
    """A gigabyte without a line end would not be held: here 100 MB, of which never more than two lines' limit is."""
    import tracemalloc

    with open(tmp_path / "p.jsonl", "wb") as f:
        for _ in range(100):
            f.write(b"[" * (1 << 20))
        f.write(b'\n{"prompt": "a"}\n')
    tracemalloc.start()
    begin = time.perf_counter()
    long, good = read_prompts(tmp_path / "p.jsonl")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "longer than" in long.error and good.prompt == "a"
    assert peak < 3 * prompts.MOST_BYTES and time.perf_counter() - begin < 5


def test_lines_come_one_at_a_time(tmp_path):
    """From a pipe the first line is there before the second one is written."""
    r, w = os.pipe()
    with open(r, "rb") as reader, open(w, "wb", buffering=0) as writer:
        found = prompts._requests(reader, False)
        writer.write(b"first\n")
        assert next(found).prompt == "first"
        writer.write(b"second\n")
        assert next(found).prompt == "second"


PIECES = [b"", b"\n", b"\r", b"\0", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\xff", b"\xc3", b"\xf0\x9f",
          b"NaN", b"-Infinity", b"1e999", b"null", b"true", b"\\ud800", b"\xef\xbb\xbf", b'"id"', b'"at"', b'"prompt"',
          b"-", b"0", b"[" * 2000, b"{\"a\":" * 2000, b"9" * 5000, "²".encode(), "\u2028".encode()]


def damaged(rng: random.Random, data: bytes) -> bytes:
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        i, n = rng.randrange(len(data) + 1), rng.choice((0, 1, 1, 2, 10, 100))
        kind = rng.randrange(5)
        if kind == 0:
            data[i: i + n] = rng.choice(PIECES)
        elif kind == 1 and i < len(data):
            data[i] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[i: i + n] = b""
        elif kind == 3:
            j = rng.randrange(len(data) + 1)
            data[i:i] = data[j: j + n]
        else:
            data[i:] = data[i:] if rng.random() < 0.9 else b""
    return bytes(data)


@pytest.mark.parametrize("seed", [11, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (12, 13, 14))])
def test_damaged_files(seed):
    """Whatever is in a file: each line that is not blank gives one Line, in order, usable or with an error; never an
    exception, and in bounded time."""
    rng, broken, whole = random.Random(seed), 0, 0
    valid = "\n".join(json.dumps(item, ensure_ascii=i % 2 == 0) for i, item in enumerate(GOOD)).encode()
    for i in range(1500):
        data = damaged(rng, valid)
        begin = time.perf_counter()
        found = list(prompts._requests(io.BytesIO(data), i % 2 == 1))
        assert time.perf_counter() - begin < 5
        body = data.removeprefix(b"\xef\xbb\xbf")
        assert [x.number for x in found] == [n for n, raw in enumerate(body.split(b"\n"), 1) if raw.strip()]
        for line in found:
            assert (line.error is None) == (line.prompt is not None)
            record = json.loads(json.dumps(head(line)))
            assert record["input"] == fingerprint(line) and record.get("error") == line.error
            if line.error is None:
                assert 0 <= line.at < float("inf") and set(line.options) <= set(prompts.OPTIONS)
                json.dumps([line.prompt, line.options], ensure_ascii=False, allow_nan=False).encode()
                whole += 1
            else:
                assert line.error.startswith(f"line {line.number}: ") and line.error.encode() and not line.options
                broken += 1
    assert whole > 1500 and broken > 750, "both kinds were met"


# ------------------------------------------------------------------ fingerprints


def test_a_fingerprint_is_of_what_was_asked(tmp_path):
    base = Line(1, 1, "hi", {"seed": 1, "temperature": 0.5, "logit_bias": {3: 1.0}})
    same = [base._replace(id="x"), base._replace(number=9), base._replace(at=3.0),
            base._replace(options=dict(reversed(list(base.options.items()))))]
    assert {fingerprint(line) for line in same} == {fingerprint(base)}
    other = [base._replace(prompt=p) for p in ("Hi", "hi ", "", "[1]", [1], [{"role": "user", "content": "hi"}])]
    other += [base._replace(options={**base.options, **o}) for o in (
        {"seed": 2}, {"n": 1}, {"logit_bias": {3: 1.5}}, {"logit_bias": {4: 1.0}}, {"stop": ["a"]})]
    other += [Line(1, 1, None, {}, error="line 1: x"), Line(2, 2, None, {}, error="line 2: x")]
    assert len({fingerprint(line) for line in [base, *other]}) == 1 + len(other)
    spellings = ['{"prompt": "hi", "temperature": 1, "stop": "a", "seed": null, "logit_bias": {"3": 1}}',
                 '{"logit_bias": {"03": 1.0}, "stop": ["a"], "temperature": 1.0, "at": 7, "prompt": "h\\u0069"}']
    assert len({fingerprint(one(tmp_path, text)) for text in spellings}) == 1
    # the keys of an answer come in the order of its schema's, so another order is another question
    schemas = ['{"a": 1, "b": 2}', '{"a":1,"b":2}', '{"b": 2, "a": 1}']
    a, b, c = (fingerprint(one(tmp_path, f'{{"prompt": "hi", "json_schema": {text}}}')) for text in schemas)
    assert a == b != c


def test_a_fingerprint_is_the_same_in_every_process():
    code = "import prompts; print(prompts.fingerprint(prompts.Line(1, 1, 'né', {'stop': ['b'], 'n': 2, 'seed': 3})))"
    found = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
                            env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    import hashlib

    by_hand = hashlib.blake2b(b'["n\\u00e9",{"n":2,"seed":3,"stop":["b"]}]', digest_size=16).hexdigest()
    assert found == {by_hand + "\n"}


# ------------------------------------------------------------------ results

ASKED = [Line(i, f"é{i}" if i % 3 else i, f"prompt {i} é😀", {"seed": i}) for i in range(1, 7)]


def answer(line: Line, reason: str = "stop", **more) -> dict:
    return {**head(line), "text": f"answer to {line.prompt}", "finish_reason": reason, **more}


def records(path) -> list[dict]:
    data = Path(path).read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(raw) for raw in data.splitlines()]


def test_a_run_and_its_resumption(tmp_path):
    path = tmp_path / "out.jsonl"
    with Results(path) as results:
        assert not any(results.done(line) for line in ASKED)
        for line in ASKED[:3]:
            results.write(answer(line))
            assert results.done(line)
    with Results(path, resume=True) as results:
        assert (results.found, results.dropped) == (3, 0)
        assert [results.done(line) for line in ASKED] == [True] * 3 + [False] * 3
        for line in ASKED[3:]:
            results.write(answer(line))
    assert records(path) == [answer(line) for line in ASKED]
    assert "é😀".encode() in path.read_bytes(), "as people write it"
    results.close()


def test_without_resume_nothing_is_overwritten(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"precious")
    with pytest.raises(ValueError, match=r"holds 8 bytes already; add --resume .* or name another file"):
        Results(path)
    assert path.read_bytes() == b"precious"
    (tmp_path / "empty").touch()
    Results(tmp_path / "empty").close()
    Results(tmp_path / "new", resume=True).close()
    for wrong in (tmp_path, tmp_path / "none" / "out"):
        with pytest.raises(ValueError, match="cannot be written: "):
            Results(wrong)


@pytest.mark.parametrize("sabotaged", [False, True])
def test_cut_at_every_byte(tmp_path, monkeypatch, sabotaged):
    """Whatever byte of the file a kill stops at, a resumed run ends with the file of a run that was never stopped. The
    twin, which appends to the piece as it is, must fail."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    path = tmp_path / "out.jsonl"
    with Results(path) as results:
        for line in ASKED[:2]:
            results.write(answer(line))
    whole, wrong = path.read_bytes(), 0
    for n in range(0, len(whole) + 1, 5 if sabotaged else 1):
        piece = whole[:n]
        path.write_bytes(piece)
        if sabotaged:
            done = {r["id"] for r in map(json.loads, piece.split(b"\n")[:-1])}
            with open(path, "a", encoding="utf-8") as f:
                f.writelines(json.dumps(answer(x), ensure_ascii=False) + "\n" for x in ASKED[:2] if x.id not in done)
        else:
            with Results(path, resume=True) as results:
                assert results.dropped in (0, n - (piece.rfind(b"\n") + 1))
                for line in ASKED[:2]:
                    if not results.done(line):
                        results.write(answer(line))
        wrong += path.read_bytes() != whole
    assert wrong > len(whole) / 10 if sabotaged else wrong == 0


def test_zeros_after_a_power_failure_are_dropped(tmp_path):
    path = tmp_path / "out.jsonl"
    record = json.dumps(answer(ASKED[0])).encode() + b"\n"
    for tail in (bytes(1), bytes(4096), record[:40] + bytes(99), b'{"id' + bytes(9)):
        path.write_bytes(record + tail)
        with Results(path, resume=True) as results:
            assert (results.found, results.dropped) == (1, len(tail)) and results.done(ASKED[0])
        assert path.read_bytes() == record


@pytest.mark.parametrize("bad", [b"{}", b'{"id": 1}', b'{"id": true, "input": "a"}', b'{"id": [], "input": "a"}', b"5",
                                 b"", b'{"id": 1, "input": 5}', b'{"id": 3, "inp', b"\xff", b"\0\0", b"[" * 100_000,
                                 b"hello", b'{"input": "a"}', b'{"id": 1.5, "input": "a"}',
                                 b'{"id": ' + b"9" * 5000 + b"}"])
def test_a_line_in_the_middle_that_is_no_record_is_reported(tmp_path, bad):
    path = tmp_path / "out.jsonl"
    good = json.dumps(answer(ASKED[0])).encode()
    for data, number in ((good + b"\n" + bad + b"\n" + good, 2), (bad + b"\n" + good + b"\n", 1),
                         (good + b"\n" + good + b"\n" + bad + b"\n", 3)):
        path.write_bytes(data)
        if not bad:  # an empty line is nobody's harm
            Results(path, resume=True).close()
            continue
        with pytest.raises(ValueError, match=rf"out\.jsonl: line {number} is no record of an earlier run \(.*mend"):
            Results(path, resume=True)
        assert path.read_bytes() == data, "left as it was"


@pytest.mark.parametrize("text", ["a diary\nwithout an end", "no line end at all", '{"prompt": "a"}',
                                  '{"id": 5, "prompt": "a"}', '{"id": "sky"}', "[1, 2", '{"a": 1', "{'id': 1",
                                  '{"id":1', "\ufeff{"])
def test_the_last_line_of_a_file_that_is_not_ours_is_never_cut(tmp_path, text):
    path = tmp_path / "mine.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="is no record of an earlier run"):
        Results(path, resume=True)
    assert path.read_text(encoding="utf-8") == text


def test_a_changed_prompt_is_asked_again_and_the_last_record_counts(tmp_path):
    path, line = tmp_path / "out.jsonl", ASKED[0]
    changed = line._replace(prompt="another one")
    with Results(path) as results:
        results.write(answer(line))
        for other in (changed, line._replace(options={"seed": 99}), line._replace(id="new")):
            assert not results.done(other)
        for same in (line._replace(at=9.0), line._replace(number=40)):
            assert results.done(same)
        results.write(answer(changed))
        assert results.done(changed) and not results.done(line), "readers take the last of an id"
    with Results(path, resume=True) as results:
        assert results.done(changed) and not results.done(line)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_what_ended_early_is_tried_again_and_a_broken_line_is_not(tmp_path, reason):
    path, broken = tmp_path / "out.jsonl", Line(7, None, None, {}, error="line 7: no prompt")
    nameless = broken._replace(number=8, error="line 8: no prompt")
    with Results(path) as results:
        results.write(answer(ASKED[0], reason))
        results.write({**head(ASKED[1]), "samples": [{"finish_reason": "stop"}, {"finish_reason": reason}]})
        results.write({**head(ASKED[2]), "samples": [{"finish_reason": "stop"}, {"finish_reason": "length"}]})
        results.write(head(broken))
        assert results.done(broken) and not results.done(nameless)
        results.write(head(nameless))
    for _ in range(2):
        with Results(path, resume=True) as results:
            assert [results.done(x) for x in (*ASKED[:3], broken, nameless)] == [False, False, True, True, True]
    assert not results.done(broken._replace(prompt="mended", error=None))
    with Results(path, resume=True) as results:
        results.write(answer(ASKED[0]))
    with Results(path, resume=True) as results:
        assert results.done(ASKED[0]) and results.found == 6


def test_odd_records(tmp_path):
    path = tmp_path / "out.jsonl"
    with Results(path) as results:
        results.write({"text": "\ud800 \n\u2028", **head(ASKED[0]), "logprobs": [float("nan"), (float("-inf"), 1.5)]})
        for wrong in ({}, {"id": 1}, {"input": "a"}, {"id": 1.5, "input": "a"}, {"id": 1, "input": None}):
            with pytest.raises(ValueError, match=r"as head\(line\) makes them"):
                results.write(wrong)
        with pytest.raises(TypeError):
            results.write({**head(ASKED[1]), "text": object()})
        assert not results.done(ASKED[1])
    record, = records(path)
    assert record["text"] == "\ud800 \n\u2028" and record["logprobs"] == [None, [None, 1.5]]
    assert path.read_bytes().startswith(b'{"id": ') and next(iter(record)) == "id"


@pytest.mark.parametrize("path", [None, "-"])
def test_standard_output(capsys, path):
    with Results(path) as results:
        results.write(answer(ASKED[0]))
        assert json.loads(capsys.readouterr().out) == answer(ASKED[0]), "flushed at once"
    with pytest.raises(ValueError, match="standard output cannot be resumed; name a file"):
        Results(path, resume=True)


def test_standard_output_of_a_notebook(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    Results().write(answer(ASKED[0]))
    assert json.loads(sys.stdout.getvalue()) == answer(ASKED[0])


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="needs /dev/null")
def test_devices_and_pipes():
    with Results("/dev/null") as results:
        results.write(answer(ASKED[0]))
    with pytest.raises(ValueError, match="is not a file that could be resumed"):
        Results("/dev/null", resume=True)
    r, w = os.pipe()
    with open(r, "rb") as reader, open(w, "wb"), Results(f"/dev/fd/{w}") as results:
        results.write(answer(ASKED[0]))
        assert json.loads(reader.readline()) == answer(ASKED[0])


def test_one_writer_at_a_time(tmp_path):
    pytest.importorskip("fcntl")
    path = tmp_path / "out.jsonl"
    code = "import sys, prompts; prompts.Results(sys.argv[1], resume=True)"
    with Results(path) as results:
        for _ in range(2):
            results.write(answer(ASKED[0]))
            found = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True)
            assert "out.jsonl is being written by another process; wait for it, or name another file" in found.stderr
        with pytest.raises(ValueError, match="another process"):
            Results(path, resume=True)
    subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, check=True)


def test_without_locks(tmp_path, monkeypatch):
    """Windows has no fcntl, and some file systems no locks."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    Results(tmp_path / "a").close()
    fake = type("fcntl", (), {"LOCK_EX": 2, "LOCK_NB": 4, "flock": lambda *_: (_ for _ in ()).throw(OSError(37, "no"))})
    monkeypatch.setitem(sys.modules, "fcntl", fake)
    Results(tmp_path / "b").close()


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_no_piece(tmp_path, monkeypatch, failure):
    """Short writes are gone on with; one that ends in an error is undone, so that the file can be gone on with."""
    path, write, room = tmp_path / "out.jsonl", os.write, [10**9]

    def short(fd, data):
        if not room[0]:
            raise failure
        n = write(fd, data[: min(7, room[0])])
        room[0] -= n
        return n

    monkeypatch.setattr(os, "write", short)
    with Results(path) as results:
        results.write(answer(ASKED[0]))
        for room[0] in (0, 1, 30):
            with pytest.raises(type(failure)):
                results.write(answer(ASKED[1]))
            assert records(path) == [answer(ASKED[0])] and not results.done(ASKED[1])
        room[0] = 10**9
        results.write(answer(ASKED[1]))
    assert records(path) == [answer(x) for x in ASKED[:2]]


def test_the_disk_is_waited_for_now_and_then(tmp_path, monkeypatch):
    synced, now = [], [100.0]
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Results(tmp_path / "out.jsonl") as results:
        for line in ASKED:
            results.write(answer(line))
            now[0] += 2
        assert len(synced) == 1
    assert len(synced) == 2


# ------------------------------------------------------------------ killed and resumed

CHILD = """
import os, random, sys, time
from prompts import Results, head, read_prompts
asked, out, seed, slow = sys.argv[1:]
rng, write = random.Random(int(seed)), os.write
def part(fd, data):  # a kernel may take a part only: so most kills find a record half written
    n = write(fd, data[: max(100, len(data) // 2)])
    time.sleep(0.0005)
    return n
if slow == "True":
    os.write = part
with Results(out, resume=True) as results:
    begun = False
    for line in read_prompts(asked):
        if not results.done(line):
            if not begun:
                begun = print("begun", flush=True) is None
            size = rng.choice((0, 10, 1000)) if rng.random() < 0.995 else 300_000
            results.write(head(line) if line.error else {**head(line), "text": "é" * size, "finish_reason": "stop"})
print("finished", flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_at_random_and_resumed(tmp_path):
    """Runs are killed with SIGKILL while they write, until one comes through: every line is answered exactly once, the
    broken ones too, and a kill never costs a record that was there before."""
    rng, asked, out = random.Random(3), tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    items = [json.dumps(GOOD[i % 5] | {"id": f"r{i}", "seed": i}) if i % 40 else "{" for i in range(2000)]
    asked.write_text("\n".join(items), encoding="utf-8")
    kills, pieces, before, rest = 0, 0, b"", ""
    while "finished" not in rest:
        slow = str(kills < 25 and kills % 3 > 0)
        child = subprocess.Popen([sys.executable, "-S", "-c", CHILD, asked, out, str(kills), slow], cwd=ROOT, text=True,
                                 stdout=subprocess.PIPE)
        with child.stdout as said:
            rest = said.readline()
            if kills < 25:
                time.sleep(rng.random() * 0.005)
                child.kill()
                kills += 1
            rest += said.read()
        child.wait()
        now = out.read_bytes()
        assert now.startswith(before), "what was whole stays"
        before = now[: now.rfind(b"\n") + 1]
        pieces += len(now) > len(before)
    assert kills >= 20 and pieces > 3, "of so many kills some fall into a record"
    found = Counter((record["id"], record["input"]) for record in records(out))
    assert found == Counter((line.id, fingerprint(line)) for line in read_prompts(asked)) and len(found) == len(items)
    before = out.read_bytes()
    again = [sys.executable, "-c", CHILD, asked, out, "0", "False"]
    subprocess.run(again, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert out.read_bytes() == before, "nothing is left to do"
