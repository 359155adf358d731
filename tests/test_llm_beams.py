"""llm.py and generate.py with beams: what is searched is what was asked for, and the cache is left as it was.

- transformers' generate(num_beams=...) on the same folder
- every text there is, scored by dense passes in float64: with biases, penalties, a temperature, a regex, without an end
- the default model; others' requests meanwhile; exceptions, aborts and interrupts; what is refused; the command line
- sabotaged twins: a part of the request that the search forgets must be noticed
"""
import itertools
import json
import math
import sys

import pytest
import torch
from tiny import tiny_folder

import generate
import llm as composition
import sampling

pytestmark = pytest.mark.usefixtures("one_thread")

ENDS = list(range(3, 258, 4))  # every fourth byte ends a text, and so do two special tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model", {"eos_token_id": ENDS}, scale=1.7)


@pytest.fixture
def llm(folder):
    return generate.load(folder, dtype="float64", device="cpu", max_batch=40)


def is_clean(llm) -> bool:
    llm.cache.check()
    return not llm.cache._sequences and llm.cache.n_free == llm.cache.n_blocks and not llm.batcher.live


def searched(llm, prompt_ids, **options) -> list:
    """[(score, ids), ..] of an answer, whose parts must agree with each other."""
    answer = llm.answer(prompt_ids, **options)
    assert not answer.finished and answer.samples == [] and answer.scores == []
    pieces = list(answer)
    assert is_clean(llm) and "".join(pieces) == answer.text and len(pieces) <= 1
    assert answer.ids == answer.samples[0].ids and len(answer.samples) == len(answer.scores) <= options.get("n", 1)
    for s in answer.samples:
        shown = s.ids[:-1] if s.finish_reason == "stop" else s.ids
        decoder = llm.batcher.decoder(list(prompt_ids), ())
        assert s.text == "".join(map(decoder.push, shown)) + decoder.finish() and s.error is None
    return list(zip(answer.scores, (s.ids for s in answer.samples)))


# ------------------------------------------------------------------ transformers


@pytest.mark.parametrize("early_stopping, theirs", [(False, "never"), (True, True), ("heuristic", False)])
def test_the_same_as_transformers(folder, llm, early_stopping, theirs):
    """Ids and scores of the n best; with biases and no end among the first three tokens, too. (Penalties are theirs on
    log-probabilities, and ours on logits: those are compared with what is written out below.)"""
    transformers = pytest.importorskip("transformers")
    net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    ended = 0
    for (prompt, beams, penalty), bias in itertools.product(
            [(b"hello", 3, 1.0), (b"to be", 4, 0.0), (b"x", 2, 2.0), (b"one and", 3, -1.0)], ({}, {65: 4.0, 66: -9.0})):
        changed = dict(renormalize_logits=True, sequence_bias={(i,): b for i, b in bias.items()}, min_new_tokens=3)
        out = net.generate(torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                           num_beams=beams, num_return_sequences=beams, max_new_tokens=9, do_sample=False,
                           eos_token_id=sorted(llm.eos_ids), pad_token_id=0, length_penalty=penalty,
                           early_stopping=theirs, output_scores=True, return_dict_in_generate=True,
                           **(changed if bias else {}))
        found = searched(llm, prompt, beams=beams, n=beams, max_tokens=9, length_penalty=penalty,
                         early_stopping=early_stopping, logit_bias=bias, min_tokens=3 if bias else 0)
        for (score, ids), row, wanted in zip(found, out.sequences[:, len(prompt):].tolist(), out.sequences_scores):
            end = next((i + 1 for i, t in enumerate(row) if t in llm.eos_ids), len(row))
            assert ids == row[:end] and score == pytest.approx(wanted.item(), abs=1e-4)
            ended += ids[-1] in llm.eos_ids
        assert len(found) == beams
    assert ended > 5


# ------------------------------------------------------------------ every text there is


def every_text(llm, prompt, max_tokens, allowed, ends, penalty=1.0, edit=lambda row, ids: row, min_tokens=0):
    """[(score, ids), ..], the best first. allowed(ids) -> the ids that may come; ends: those that end a text; edit(row,
    ids) changes the logits of one row (V,). Each prefix is computed anew, without a cache."""
    found, open_ = [], [((), 0.0)]
    while open_:
        with torch.inference_mode():
            rows = llm.model(torch.tensor([[*prompt, *ids] for ids, _ in open_]))[:, -1]
        longer = []
        for (ids, total), row in zip(open_, rows):
            may = [i for i in allowed(ids) if len(ids) >= min_tokens or i not in ends]
            masked = torch.full_like(row, -math.inf)
            masked[may] = edit(row.clone(), ids)[may]
            for token, logp in zip(may, masked.log_softmax(-1)[may].tolist()):
                text, new = (*ids, token), total + logp
                if token in ends or len(text) == max_tokens:
                    found.append((new / len(text)**penalty, list(text)))
                else:
                    longer.append((text, new))
        open_ = longer
    return sorted(found, key=lambda x: -x[0])


FEW = [7, 40, 65, 66, 67]  # of which 7 and 67 are ends
PROMPT = list(b"A tale (")  # two of them are in it


def penalised(row, ids):
    """Written out: each of prompt and output once by 1.4, then 0.3 and 0.2 a time for the output; temperature 0.8."""
    for i in {*PROMPT, *ids}:
        row[i] = row[i] / 1.4 if row[i] > 0 else row[i] * 1.4
    for i in ids:
        row[i] -= 0.2
    for i in set(ids):
        row[i] -= 0.3
    return row / 0.8


def test_a_wide_search_finds_the_best_of_all_texts(llm):
    """As many beams as there are texts: what is found is what enumeration finds, in order, whatever was asked for."""
    assert_exhaustive(llm)


def assert_exhaustive(llm):
    bias = {i: 0.0 if i in FEW else -math.inf for i in range(270)}
    bias[66] = 1.5
    for name, options, other in (
            ("bias", {}, {}), ("penalty", {"length_penalty": -0.5}, {"penalty": -0.5}),
            ("min_tokens", {"min_tokens": 3}, {"min_tokens": 3}), ("no end", {"ignore_eos": True}, {"ends": ()}),
            ("penalties", {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2,
                           "temperature": 0.8}, {"edit": penalised})):
        edit = other.pop("edit", lambda row, ids: row)

        def edited(row, ids, edit=edit):  # biases come first
            row[66] += 1.5
            return edit(row, ids)

        every = every_text(llm, PROMPT, 4, lambda ids: FEW, **{"ends": (7, 67), "edit": edited, **other})
        found = searched(llm, PROMPT, beams=125, n=30, max_tokens=4, logit_bias=bias, **options)
        assert [ids for _, ids in found] == [ids for _, ids in every[:30]], name
        assert [x for x, _ in found] == pytest.approx([x for x, _ in every[:30]], abs=1e-9), name


@pytest.mark.parametrize("forgets", ["output", "prompt", "logit_bias", "temperature", "min_tokens"])
def test_a_search_that_forgets_a_part_of_the_request_is_noticed(llm, monkeypatch, forgets):
    right = sampling.warp

    def warp(logits, params, prompt, output, mask):
        if forgets == "logit_bias":
            params = params._replace(bias_values=params.bias_values.clamp(max=0))
        if forgets == "temperature":
            params = params._replace(temperature=torch.ones_like(params.temperature))
        return right(logits, params, None if forgets == "prompt" else prompt,
                     None if forgets == "output" else output, None if forgets == "min_tokens" else mask)

    monkeypatch.setattr(sampling, "warp", warp)
    with pytest.raises(AssertionError, match=r"penalties|bias|min_tokens"):
        assert_exhaustive(llm)


LANGUAGE = [a + b + c for a in ("ab", "ba", "b") for b in ("x", "yx", "") for c in ("!", "")]


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True}, {"min_tokens": 3}])
def test_texts_of_a_form(llm, more):
    """All texts of a regex, of bytes: each continuation's share is that among those that the language allows. An end
    that min_tokens or ignore_eos forbids comes where nothing else may, as it does without beams."""
    pytest.importorskip("llguidance")
    last = sorted(llm.eos_ids)

    def allowed(ids):
        text = bytes(ids).decode()
        longer = sorted({ord(t[len(text)]) for t in LANGUAGE if t.startswith(text) and t != text})
        early = more.get("ignore_eos") or len(ids) < more.get("min_tokens", 0)
        return longer + [i for i in last if text in LANGUAGE and not (early and longer)]

    assert not {*b"abxy!"} & llm.eos_ids
    every = every_text(llm, PROMPT, 9, allowed, llm.eos_ids)
    found = searched(llm, PROMPT, beams=40, n=20, max_tokens=9, regex="(ab|ba|b)(x|yx)?!?", **more)
    assert [ids for _, ids in found] == [ids for _, ids in every[:20]]
    assert [x for x, _ in found] == pytest.approx([x for x, _ in every[:20]], abs=1e-9)


def test_a_schema_is_kept_by_every_beam(llm):
    pytest.importorskip("llguidance")
    answer, = llm.generate("cats", json_schema={"enum": ["yet", "lie", 12]}, beams=4, n=3, max_tokens=9)
    assert len({tuple(s.ids) for s in answer.samples}) == 3, "a text with another end is another text"
    assert all(json.loads(s.text) in ("yet", "lie", 12) for s in answer.samples)


def test_a_constraint_that_fails_ends_the_search(llm):
    pytest.importorskip("llguidance")
    answer = llm.answer(PROMPT, regex="(ab)+c", beams=2, max_tokens=9)
    calls = itertools.count()
    right, answer._allowed = answer._allowed, lambda ids: right(ids if next(calls) < 3 else [0, 0])
    with pytest.raises(RuntimeError, match="the constraint cannot go on: token id 0 is not allowed behind 0 tokens"):
        list(answer)
    assert answer.finish_reason == "error" and is_clean(llm)


# ------------------------------------------------------------------ the sampler's defaults, the rest of the interface


def test_what_is_recommended_for_drawing_is_not_searched_by(tmp_path, folder, llm):
    """temperature, top_k, top_p and min_p of generation_config.json are for drawing; given by hand they count, and its
    repetition penalty always does."""
    plain = searched(llm, b"hello", beams=4, n=4, max_tokens=8)
    drawing = {"eos_token_id": ENDS, "do_sample": True, "temperature": 0.3, "top_k": 1, "top_p": 0.4, "min_p": 0.9}
    other = generate.load(tiny_folder(tmp_path / "a", drawing, scale=1.7), dtype="float64")
    assert other.defaults["top_k"] == 1
    assert searched(other, b"hello", beams=4, n=4, max_tokens=8) == plain
    assert len(searched(other, b"hello", beams=4, n=4, max_tokens=8, top_k=1)) == 1, "one continuation of each text"
    greedy, = llm.generate("hello", raw=True, temperature=0, max_tokens=8)
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"beams": 1}, {"beams": 1, "temperature": 0}):
        assert searched(llm, b"hello", max_tokens=8, **{"beams": 4, **options})[0][1] == greedy.ids, options
    scores = [searched(llm, b"hello", beams=4, max_tokens=8, temperature=t)[0][0] for t in (0.5, 1.0)]
    assert scores[0] > scores[1] == plain[0][0]
    repeats = {"eos_token_id": ENDS, "repetition_penalty": 1.4}
    other = generate.load(tiny_folder(tmp_path / "b", repeats, scale=1.7), dtype="float64")
    found = searched(other, b"hello", beams=4, n=4, max_tokens=8)
    assert found == searched(llm, b"hello", beams=4, n=4, max_tokens=8, repetition_penalty=1.4) != plain


def test_the_rest_of_an_answer(llm):
    answer, = llm.generate("hello", raw=True, beams=3, n=2, max_tokens=8, logprobs=0, temperature=0.5)
    ids = answer.prompt_ids + answer.ids
    with torch.inference_mode():
        own = llm.model(torch.tensor([ids]))[0].log_softmax(-1)
    for i, entry in enumerate(answer.logprobs):
        assert entry["id"] == answer.ids[i] and entry["top"] == []
        assert entry["logprob"] == pytest.approx(own[len(answer.prompt_ids) - 1 + i, answer.ids[i]].item(), abs=1e-9)
    assert len(answer.logprobs) == len(answer.ids) and answer.ttft_s > 0 and answer.tokens_per_s > 0
    assert answer.finish_reason in ("stop", "length") and str(len(answer.ids)) in repr(answer)
    with pytest.raises(ValueError, match="once"):
        list(answer)
    empty, = llm.generate("hello", raw=True, beams=3, max_tokens=0)
    assert (empty.ids, empty.text, empty.finish_reason, empty.scores) == ([], "", "length", [0.0])
    assert len(llm.generate("hello", raw=True, beams=3, ignore_eos=True)[0].ids) == 64 + 1 - 5, "the context is filled"


def test_the_prompt_is_found_again(llm):
    prompt = [5 + 7 * i % 200 for i in range(33)]
    for beams, salt, cached in ((3, "", 0), (3, "", 32), (None, "", 32), (3, "other", 0)):
        answer = llm.answer(prompt, beams=beams, max_tokens=6, salt=salt)
        list(answer)
        assert answer.cached == cached and is_clean(llm)


def test_several_prompts_and_others_meanwhile(llm):
    """Each prompt has its own search; a request that is being answered goes on behind it as if nothing had been."""
    options = dict(beams=4, n=2, max_tokens=8)
    alone = [searched(llm, p, **options) for p in (b"one", b"two", b"three")]
    together = llm.generate(["one", "two", "three"], raw=True, **options)
    assert [list(zip(a.scores, (s.ids for s in a.samples))) for a in together] == alone
    drawn = dict(max_tokens=30, ignore_eos=True, temperature=1.0, seed=3)
    undisturbed, = llm.generate("hello", raw=True, **drawn)
    other = llm.answer(list(b"hello"), **drawn)
    pieces = iter(other)
    next(pieces)
    between = llm.answer(b"two", **options)
    list(between)
    assert between.samples[1].ids == alone[1][1][1] and len(llm.batcher.live) == 1
    list(pieces)
    assert other.ids == undisturbed.ids and is_clean(llm)


def test_passes_go_the_batcher_s_way(llm):
    """CUDA graphs and a model on several ranks are a `forward` of the batcher, which wants whole steps."""
    wanted, steps = searched(llm, b"hello", beams=3, max_tokens=8), []

    def forward(step):
        steps.append(len(step.kv_len))
        return llm.model(step.tokens, step.positions, step.attend, step.rows)

    llm.batcher = llm.new_batcher(forward=forward, token_budget=2)
    assert searched(llm, b"hello", beams=3, max_tokens=8)[0][1] == wanted[0][1]
    assert steps[:3] == [1, 1, 1] and set(steps[3:]) == {3}, "the prompt in pieces of two, then three beams a pass"


# ------------------------------------------------------------------ how it may end


def test_an_exception_leaves_the_cache_whole(llm, monkeypatch):
    """At every pass of the model; the other prompts of the same call are answered, and so is the next one."""
    wanted, forward = searched(llm, b"one", beams=3, max_tokens=8), llm.model.forward
    for at in itertools.count():
        calls = itertools.count()

        def failing(*args, calls=calls, at=at):
            if next(calls) == at:
                raise RuntimeError("boom")
            return forward(*args)

        monkeypatch.setattr(llm.model, "forward", failing)
        found = llm.generate(["one", "three"], raw=True, beams=3, max_tokens=8)
        monkeypatch.setattr(llm.model, "forward", forward)
        assert is_clean(llm)
        ended = [a.finish_reason for a in found]
        if "error" not in ended:
            break
        assert ended.count("error") == 1
        bad = found[ended.index("error")]
        assert bad.error == "RuntimeError: boom" and (bad.ids, bad.text, bad.scores) == ([], "", [])
        with pytest.raises(RuntimeError, match="boom"):
            bad.raise_error()
    assert at > 8 and searched(llm, b"one", beams=3, max_tokens=8) == wanted


def test_s12_nan_logits_end_with_an_error(tmp_path):
    """S12 (JustVugg/colibri issue #369): NaN logits are an error in a search as well, never token 0."""
    llm = generate.load(tiny_folder(tmp_path / "m", scale=float("nan")), dtype="float32")
    with pytest.raises(RuntimeError, match="of beam 0: the logits have NaN"):
        llm.generate("x", raw=True, beams=2)
    assert is_clean(llm)


def test_abort_and_whoever_does_not_read(llm, monkeypatch):
    forward = llm.model.forward
    for at in range(4):  # set before the first pass, and in the middle of others
        answer, calls = llm.answer(b"hello", beams=3, n=2, max_tokens=20, ignore_eos=True), itertools.count(1)

        def reading(*args, answer=answer, calls=calls, at=at):
            answer.abort = next(calls) >= at
            return forward(*args)

        answer.abort = at == 0
        monkeypatch.setattr(llm.model, "forward", reading)
        assert list(answer) == [] and answer.finish_reason == "abort" and answer.ids == [] and is_clean(llm)
        assert next(calls) == at + 1, "the pass that runs is the last one"
        monkeypatch.setattr(llm.model, "forward", forward)
    answer = llm.answer(b"hello", beams=3, max_tokens=5)
    answer.begin()
    answer.close()
    assert answer.finish_reason == "abort" and answer.finished
    unread = llm.answer(b"hello", beams=3)
    unread.close()
    assert not unread.finished and is_clean(llm)


def test_an_interrupt_is_raised_and_leaves_nothing_behind(llm, monkeypatch):
    wanted, commit = searched(llm, b"hello", beams=3, max_tokens=8), llm.cache.commit
    answer, calls = llm.answer(b"hello", beams=3, max_tokens=8), itertools.count()

    def interrupted(step, keep=None):
        commit(step, keep)
        if next(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(llm.cache, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(answer)
    monkeypatch.setattr(llm.cache, "commit", commit)
    assert answer.finish_reason == "abort" and is_clean(llm)
    assert searched(llm, b"hello", beams=3, max_tokens=8) == wanted


def test_too_few_blocks_now_or_ever(llm):
    """What can never fit is refused at the door; what others have no room for is this answer's error, with numbers."""
    with pytest.raises(ValueError, match=r"90 beams of 40 tokens behind a prompt of 5 can take 270 blocks of the KV "
                                         r"cache, which has 160; lower beams or max_tokens"):
        llm.answer(b"hello", beams=90, max_tokens=40)
    others = [llm.answer(list(b"hello"), max_tokens=60, ignore_eos=True, seed=i, temperature=1.0) for i in range(40)]
    for other in others:
        other.begin()
    while len(others[0].ids) < 30:
        llm.batcher.step()
    with pytest.raises(RuntimeError, match=r"the KV cache has .* for it; lower beams"):
        list(llm.answer(b"hello", beams=50, max_tokens=40))
    while llm.batcher.live:
        llm.batcher.step()
    assert is_clean(llm) and [len(o.ids) for o in others] == [60] * 40


# ------------------------------------------------------------------ at the door


@pytest.mark.parametrize("options, why", [
    ({"beams": 0}, "beams is 0, but must be"), ({"beams": "4"}, "beams is '4'"), ({"beams": True}, "beams is True"),
    ({"length_penalty": 1.0}, "length_penalty is of a beam search"), ({"early_stopping": True}, "early_stopping is of"),
    ({"beams": 2, "length_penalty": math.nan}, "length_penalty is nan"),
    ({"beams": 2, "early_stopping": "never"}, "early_stopping is 'never'"),
    ({"beams": 2, "n": 3}, "n is 3, but a search with 2 beams"), ({"beams": 2, "n": 0}, "n is 0"),
    ({"beams": 2, "temperature": 0}, "temperature is 0, which leaves"), ({"beams": 2, "top_p": 0}, "top_p is 0"),
    ({"beams": 2, "logprobs": 1}, "logprobs is 1, but"), ({"beams": 2, "stop": "x"}, "stop strings cannot end"),
    ({"beams": 2, "max_tokens": -1}, "max_tokens is -1"),
    ({"beams": 2, "min_tokens": 9, "max_tokens": 8}, "min_tokens is 9")])
def test_mistakes_are_told_before_anything_is_computed(llm, options, why, monkeypatch):
    monkeypatch.setattr(llm.model, "forward", lambda *_: pytest.fail("something was computed"))
    with pytest.raises(ValueError, match=why):
        llm.answer(b"hello", **options)
    assert is_clean(llm)


def run(capsys, *argv) -> tuple[int, str, str]:
    try:
        code = generate.main(argv)
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize("flags, mentions", [
    (["--length-penalty", "1"], "go with --beams"), (["--early-stopping"], "go with --beams"),
    (["--beams", "2", "--draft", "ngram"], "leave out --draft"),
    (["--beams", "2", "--draft", "ngram", "--compare"], "leave out --draft"),
    (["--beams", "2", "--n", "3"], "raise beams"), (["--beams", "2", "--stop", "x"], "leave out stop"),
    (["--beams", "2", "--temperature", "0"], "temperature is 0"),
    (["--beams", "2", "--logprobs", "2", "--json"], "logprobs is 2"), (["--beams", "none"], "'none'")])
def test_flags_that_do_not_go_together(capsys, folder, flags, mentions):
    code, out, err = run(capsys, "hello", *flags, "--model", folder, "--quiet")
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and mentions in err


def test_a_file_of_prompts_is_not_searched(capsys, folder):
    code, out, err = run(capsys, "--prompts", __file__, "--beams", "2", "--model", folder)
    assert code == 2 and "one answer at a time" in err and err.count("\n") == 1


# ------------------------------------------------------------------ the command line


def test_the_command_line(capsys, folder, llm):
    wanted, = llm.generate("hello", raw=True, beams=4, n=2, max_tokens=9, length_penalty=0.0, early_stopping=True)
    flags = ["hello", "--raw", "--model", folder, "--dtype", "float64", "--max-tokens", "9", "--beams", "4",
             "--length-penalty", "0", "--early-stopping"]
    code, out, err = run(capsys, *flags)
    assert code == 0 and out == wanted.text + "\n" and f"score {wanted.scores[0]:.4f}" in err and "found after" in err
    assert "note:" not in err
    code, out, err = run(capsys, *flags, "--n", "2", "--seed", "1", "--top-k", "200")
    assert code == 0 and out.startswith("[1] ") and "\n\n[2] " in out and "1 more answer |" in err
    assert err.count("note:") == 1 and "--seed changes nothing with --beams" in err
    code, out, err = run(capsys, *flags, "--n", "2", "--json", "--quiet", "--logprobs", "0")
    result = json.loads(out)
    assert (code, err) == (0, "") and result["ids"] == wanted.ids and result["score"] == wanted.scores[0]
    assert [(s["ids"], s["score"]) for s in result["samples"]] == list(zip((s.ids for s in wanted.samples),
                                                                           wanted.scores))
    assert [x["id"] for x in result["logprobs"]] == wanted.ids


def test_a_conversation_with_beams(capsys, monkeypatch, tmp_path):
    """Every turn is searched for; behind the first, what was said is found in the cache."""
    typed = iter(["hi", "and then?"])

    def fake_input(prompt=""):
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", fake_input)
    folder = tiny_folder(tmp_path / "m", max_position_embeddings=1024)
    code, out, err = run(capsys, "--model", folder, "--beams", "3", "--max-tokens", "8")
    lines = [line for line in err.splitlines() if " | prompt " in line]
    assert code == 0 and len(lines) == 2 and "cached" not in lines[0] and "cached" in lines[1]
    assert all("score -" in line for line in lines)


def test_ctrl_c_ends_a_search(capsys, folder, monkeypatch):
    import signal

    forward, calls = composition.Llama.forward, itertools.count()

    def interrupted(*args):
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return forward(*args)

    monkeypatch.setattr(composition.Llama, "forward", interrupted)
    code, out, err = run(capsys, "hello", "--model", folder, "--beams", "3", "--max-tokens", "30", "--ignore-eos")
    assert code == 130 and out == "\n" and err.splitlines()[-1].endswith("| abort") and "Traceback" not in err
    assert next(calls) == 4, "the pass that ran was the last one"


def test_the_default_model(default_gguf):
    """Four beams find a text that is likelier than what one finds, and say it in full words."""
    llm = generate.load(default_gguf, dtype="float32")
    one, four = (llm.generate("Why is the sky blue?", beams=beams, max_tokens=16)[0] for beams in (1, 4))
    greedy, = llm.generate("Why is the sky blue?", temperature=0, max_tokens=16)
    assert one.ids == greedy.ids and four.scores[0] > one.scores[0] and "sky" in four.text and is_clean(llm)
