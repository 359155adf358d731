"""generate.py: the Python API and the command line, on a tiny random model and on the default one."""
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import tiny_folder

import generate
import prompts

ROOT = Path(__file__).resolve().parent.parent
@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def llm(folder):
    return generate.load(folder, dtype="float64", device="cpu")


def naive(llm, ids: list[int], n: int) -> list[int]:
    """Greedy decoding without a cache: the whole sequence through the model for every token."""
    ids = list(ids)
    begin = len(ids)
    for _ in range(n):
        with torch.inference_mode():
            ids.append(int(llm.model(torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] in llm.eos_ids:
            break
    return ids[begin:]


# ------------------------------------------------------------------ the Python API


def test_greedy_equals_decoding_without_a_cache(llm):
    ids = llm.encode("hello", raw=True)
    answer, = llm.generate("hello", raw=True, temperature=0, max_tokens=20)
    assert answer.ids == naive(llm, ids, 20)
    assert answer.prompt_ids == ids == list(b"hello")
    assert answer.text == llm.tokenizer.decode(answer.ids)
    assert answer.finish_reason == ("stop" if answer.ids[-1] in llm.eos_ids else "length")
    llm.cache.check()
    assert llm.cache.n_free == llm.cache.n_blocks


def test_a_prompt_longer_than_a_chunk(llm, monkeypatch):
    ids = list(range(40))
    whole = naive(llm, ids, 8)
    for chunk in (1, 7, 39, 40, 41):
        llm.batcher = llm.new_batcher(token_budget=chunk)
        answer = llm.answer(ids, max_tokens=8)
        list(answer)
        assert answer.ids == whole, chunk


def test_several_prompts(llm):
    together = llm.generate(["a", "bb", "ccc"], max_tokens=5)
    assert [a.ids for a in together] == [llm.generate(p, max_tokens=5)[0].ids for p in ("a", "bb", "ccc")]
    assert llm.generate([]) == []


def test_b10_max_tokens_0_1_2(llm):
    """B10 (huggingface/transformers PRs #28579, #28621): max_tokens 0 gives no token, 1 gives one."""
    for n in (0, 1, 2):
        answer, = llm.generate("abcd", raw=True, max_tokens=n)
        assert len(answer.ids) == n and answer.finish_reason == "length"
        assert llm.cache.n_free == llm.cache.n_blocks
    with pytest.raises(ValueError, match="-1"):
        llm.generate("abcd", raw=True, max_tokens=-1)


def test_the_context_is_filled_but_never_passed(llm):
    for n, most in ((64, 1), (63, 2), (60, 5)):
        answer = llm.answer([1] * n, stop=())
        llm_eos, llm.eos_ids = llm.eos_ids, set()
        list(answer)
        llm.eos_ids = llm_eos
        assert len(answer.ids) == most and answer.finish_reason == "length"
    with pytest.raises(ValueError, match=r"65 tokens.*64"):
        llm.answer([1] * 65)


def test_b09_empty_and_impossible_prompts(llm):
    """B09 (vllm-project/vllm issues #7283, #7632): an empty prompt or an id outside the vocabulary is refused."""
    for ids, number in (([], "empty"), ([270], "270"), ([-1], "-1")):
        with pytest.raises(ValueError, match=number):
            llm.answer(ids)
    with pytest.raises(ValueError, match="unknown option 'temprature'"):
        llm.generate("x", temprature=1)


def test_d05_any_of_several_end_tokens_stops(llm):
    """D05 (vllm-project/vllm issue #4180): the checkpoint lists several end tokens; whichever comes first ends it."""
    ids = list(b"hello")
    free = naive(llm, ids, 20)
    for position in (0, 3, 7):
        end = free[position]
        llm.batcher.eos_ids = {269, end, 268}
        answer = llm.answer(ids, max_tokens=20)
        text = "".join(answer)
        stop = free.index(end)
        assert answer.ids == free[: stop + 1] and answer.finish_reason == "stop"
        assert text == answer.text == llm.tokenizer.decode(free[:stop])


@pytest.mark.parametrize("generation, config, expected", [
    ({"eos_token_id": [257, 259]}, 258, {257, 259, 258}),  # generation_config first; the tokenizer's own end as well
    ({}, 257, {257, 258}), ({}, [257, 256], {257, 256, 258}), ({"eos_token_id": None}, 257, {257, 258}),
    ({}, None, {258}),
])
def test_ld_29_eos_may_be_a_number_a_list_or_null(tmp_path, generation, config, expected):
    """LD-29 (vllm #4180, #4182): eos_token_id is an int, a list or null; generation_config.json comes first."""
    folder = tiny_folder(tmp_path / "m", generation, eos_token_id=config)
    assert generate.load(folder, dtype="float32").eos_ids == expected


def test_seeds(llm):
    def run(seed):
        return llm.generate("abc", raw=True, temperature=1.5, max_tokens=16, seed=seed)[0].ids

    assert run(7) == run(7) != run(8)
    assert run(None) != run(None), "without a seed each answer is fresh"
    options = dict(temperature=1.5, max_tokens=16, seed=7)
    beside = llm.generate(["xyz", "abc", "abc"], raw=True, **options)
    assert beside[1].ids == beside[2].ids == run(7), "a seed's answer does not depend on other prompts"


def test_stop_strings(llm):
    free = llm.generate("hello", raw=True, temperature=1.0, seed=3, max_tokens=30)[0]
    stop = free.text[5:7]
    answer = llm.answer(llm.encode("hello", raw=True), temperature=1.0, seed=3, max_tokens=30, stop=stop)
    pieces = list(answer)
    assert "".join(pieces) == answer.text == free.text[: free.text.index(stop)]
    assert answer.finish_reason == "stop" and len(answer.ids) <= len(free.ids)


def test_logprobs_are_the_models_own(llm):
    answer, = llm.generate("hello", raw=True, temperature=0.3, top_k=3, seed=1, max_tokens=6, logprobs=4)
    ids = answer.prompt_ids + answer.ids
    with torch.inference_mode():
        expected = llm.model(torch.tensor([ids]))[0].log_softmax(-1)
    assert len(answer.logprobs) == len(answer.ids) == 6
    for i, entry in enumerate(answer.logprobs):
        row = expected[len(answer.prompt_ids) - 1 + i]
        assert entry["id"] == answer.ids[i] and abs(entry["logprob"] - row[entry["id"]].item()) < 1e-6
        assert [t for t, _ in entry["top"]] == row.topk(4).indices.tolist()


def test_penalties_see_prompt_and_output(llm):
    """The loop hands `warp` the history: a strong presence penalty lets no token come twice."""
    answer, = llm.generate("hello", raw=True, presence_penalty=1e6, max_tokens=30)
    assert len(set(answer.ids)) == len(answer.ids)
    answer, = llm.generate("hello", raw=True, repetition_penalty=1e6, max_tokens=20)
    assert not set(answer.ids) & set(answer.prompt_ids)


def test_d16_ids_include_the_stop_token_and_text_does_not(llm):
    """D16 (lvyufeng/PocketLLM PR #133; InternLM/lmdeploy PR #1823): one rule for ids, text, logprobs and reason; both
    follow-ups, with and without the end token, equal their cold runs."""
    free = naive(llm, list(b"hello"), 12)
    llm.batcher = llm.new_batcher()
    llm.batcher.eos_ids = {free[4]}
    stop = free.index(free[4])
    first = llm.answer(list(b"hello"), logprobs=1)
    text = "".join(first)
    assert first.ids == free[: stop + 1] and text == llm.tokenizer.decode(free[:stop])
    assert len(first.logprobs) == len(first.ids) and first.finish_reason == "stop"
    for tail in (first.ids[:-1], first.ids):
        prompt = first.prompt_ids + tail + list(b"!" * 20)
        answers = [llm.answer(prompt, max_tokens=4, salt=salt) for salt in ("a", "a", "b")]
        for answer in answers:
            list(answer)
        assert [a.cached for a in answers] == [0, (len(prompt) - 1) // 16 * 16, 0]
        assert answers[0].ids == answers[1].ids == answers[2].ids


def test_an_answer_is_iterated_over_once_and_its_speed_is_its_own(llm):
    answer = llm.answer(list(b"hello"), max_tokens=4)
    for _ in answer:
        time.sleep(0.2)
    assert answer.decode_s < 0.2, "the reader's time is not the model's"
    with pytest.raises(ValueError, match="once"):
        list(answer)


@pytest.mark.parametrize("wrong", [{"seed": 1.5}, {"seed": "x"}, {"logprobs": 1.5}, {"max_tokens": 2.5},
                                   {"max_tokens": "3"}, {"stop": [""]}])
def test_wrong_arguments_are_found_at_the_door(llm, wrong):
    with pytest.raises(ValueError):
        llm.answer(list(b"hello"), **wrong)
    with pytest.raises(ValueError):
        llm.answer([1.7, 2.2])
    with pytest.raises(ValueError):
        llm.answer("12")
    with pytest.raises(ValueError, match="raw"):
        llm.generate("x", raw=True, system="s")


def test_a_single_safetensors_file(folder, llm):
    alone = generate.load(str(Path(folder) / "model.safetensors"), dtype="float64")
    assert alone.generate("hi", max_tokens=5)[0].ids == llm.generate("hi", max_tokens=5)[0].ids
    assert alone.name == "model.safetensors"


def test_abort_keeps_what_was_made(llm):
    answer = llm.answer(list(b"hello"), max_tokens=30)
    for i, _ in enumerate(answer):
        answer.abort = i >= 2
    assert answer.finish_reason == "abort" and 3 <= len(answer.ids) <= 30
    assert answer.ids == naive(llm, list(b"hello"), len(answer.ids))
    assert llm.cache.n_free == llm.cache.n_blocks


def test_whoever_stops_iterating_leaves_nothing_behind(llm):
    answer = llm.answer(list(b"hello"), max_tokens=30)
    pieces = iter(answer)
    next(pieces)
    pieces.close()
    assert answer.finish_reason == "abort" and not llm.batcher.live
    llm.cache.check()
    assert llm.cache.n_free == llm.cache.n_blocks


def test_an_exception_in_the_model_leaves_the_cache_whole(llm, monkeypatch):
    answer = llm.answer(list(b"hello"), max_tokens=30)
    calls = []
    forward = llm.model.forward

    def failing(*args):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("boom")
        return forward(*args)

    monkeypatch.setattr(llm.model, "forward", failing)
    with pytest.raises(RuntimeError, match="boom"):
        list(answer)
    llm.cache.check()
    assert llm.cache.n_free == llm.cache.n_blocks and answer.finish_reason == "error"
    monkeypatch.setattr(llm.model, "forward", forward)
    again = llm.answer(list(b"hello"), max_tokens=5)
    list(again)
    assert again.ids == naive(llm, list(b"hello"), 5)


def test_prompts_are_answered_together(llm):
    prompts = ["hello", "a", "some more words", "hello"]
    together = llm.generate(prompts, raw=True, max_tokens=12)
    assert [a.ids for a in together] == [naive(llm, list(p.encode()), 12) for p in prompts]
    assert llm.batcher.stats.steps < 12 + 3, "twelve tokens each, in about twelve passes"
    llm.cache.check()
    with pytest.raises(ValueError, match="empty"):
        llm.generate(["fine", ""], raw=True)
    assert not llm.batcher.live, "one wrong prompt: none is begun"


def test_answers_that_take_turns_share_the_time(llm):
    """Another answer's steps are this one's too: they are no idle time of its reader."""
    answers = [llm.answer(list(b"hello"), max_tokens=40, ignore_eos=True, seed=i, temperature=1.0) for i in (1, 2)]
    list(zip(*answers))
    speeds = [a.tokens_per_s for a in answers]
    assert max(speeds) < 2 * min(speeds)
    with pytest.raises(ValueError, match="a prompt is a text"):
        llm.generate([[1, 2, 3]])
    with pytest.raises(ValueError, match="stop is 5"):
        llm.generate("x", raw=True, stop=5)


def test_several_answers_to_one_prompt(llm):
    answer, = llm.generate("hello", raw=True, n=3, temperature=1.0, seed=4, max_tokens=8)
    assert len({tuple(s.ids) for s in answer.samples}) == 3 and answer.ids == answer.samples[0].ids
    alone, = llm.generate("hello", raw=True, temperature=1.0, seed=4, max_tokens=8)
    assert alone.ids == answer.ids, "the first of n is what one alone would be"
    with pytest.raises(ValueError, match="n is 17, but must be 1 to 16"):
        llm.generate("hello", raw=True, n=17)


def test_s12_nan_logits_end_with_an_error(tmp_path):
    """S12 (JustVugg/colibri issue #369): NaN logits are an error, never token 0."""
    folder = tiny_folder(tmp_path / "m", scale=float("nan"))
    llm = generate.load(folder, dtype="float32")
    for temperature in (0, 1):
        with pytest.raises(RuntimeError, match="not finite"):
            llm.generate("x", raw=True, temperature=temperature)
    assert [a.finish_reason for a in llm.generate(["x", "y"], raw=True)] == ["error", "error"]
    assert llm.cache.n_free == llm.cache.n_blocks


# ------------------------------------------------------------------ the command line, in this process


def run(capsys, *argv, stdin: str | None = None, monkeypatch=None) -> tuple[int, str, str]:
    if stdin is not None:
        import io

        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    try:
        code = generate.main(argv)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err


def test_text_goes_to_stdout_and_statistics_to_stderr(capsys, folder):
    code, out, err = run(capsys, "hello", "--model", folder, "--max-tokens", "5", "--dtype", "float32")
    assert code == 0 and out.endswith("\n")
    for part in ("model", "float32", "prompt 24 tokens", "first token after", "tokens/s", "length"):
        assert part in err
    code, quiet_out, err = run(capsys, "hello", "--model", folder, "--max-tokens", "5", "--dtype", "float32", "--quiet")
    assert (code, quiet_out, err) == (0, out, "")


def test_json(capsys, folder, llm):
    code, out, err = run(capsys, "hello", "--model", folder, "--max-tokens", "4", "--dtype", "float64", "--json",
                         "--logprobs", "2", "--raw")
    result = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert list(result) == ["prompt_ids", "ids", "text", "finish_reason", "ttft_s", "tokens_per_s", "logprobs"]
    assert result["ids"] == naive(llm, list(b"hello"), 4) and result["prompt_ids"] == list(b"hello")
    assert len(result["logprobs"]) == 4 and len(result["logprobs"][0]["top"]) == 2
    assert result["ttft_s"] > 0 and result["tokens_per_s"] > 0


def test_the_prompt_may_come_on_standard_input(capsys, folder, monkeypatch):
    flags = ("--model", folder, "--max-tokens", "4", "--json", "--quiet")
    piped = run(capsys, *flags, stdin="hello\n", monkeypatch=monkeypatch)
    assert json.loads(piped[1])["ids"] == json.loads(run(capsys, "hello", *flags)[1])["ids"]
    code, _, err = run(capsys, *flags, stdin="\n", monkeypatch=monkeypatch)
    assert code == 2 and "empty" in err


def test_the_models_own_sampling_defaults(tmp_path):
    recommended = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_length": 9}
    llm = generate.load(tiny_folder(tmp_path / "a", recommended), dtype="float32")
    assert llm.defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    greedy = generate.load(tiny_folder(tmp_path / "b", {"do_sample": False, "temperature": 0.6}), dtype="float32")
    assert greedy.defaults["temperature"] == 0
    nothing = generate.load(tiny_folder(tmp_path / "c"), dtype="float32")
    assert nothing.defaults == {"temperature": 0.0}


WRONG = {  # name: (command line, what the message mentions); MODEL stands for a good folder, TMP for one of bad files
    "missing file": ("x --model TMP/nowhere.gguf", "nowhere"),
    "folder without config": ("x --model TMP", "config.json"),
    "not a model": ("x --model TMP/notes.txt", "notes.txt"),
    "corrupted gguf": ("x --model TMP/cut.gguf", "cut.gguf"),
    "prompt too long": ("LONG --raw --model MODEL", "100 tokens"),
    "empty prompt": ("'' --model MODEL", "empty"),
    "unknown flag": ("x --colour", "--colour"),
    "flag without value": ("x --seed", "--seed"),
    "not a number": ("x --top-k many", "many"),
    "temperature": ("x --temperature -1 --model MODEL", "-1"),
    "temperature nan": ("x --temperature nan --model MODEL", "nan"),
    "top-p": ("x --top-p 1.5 --model MODEL", "1.5"),
    "top-k": ("x --top-k -2 --model MODEL", "-2"),
    "min-p": ("x --min-p 2 --model MODEL", "2"),
    "repetition": ("x --repetition-penalty 0 --model MODEL", "0"),
    "max-tokens": ("x --max-tokens -3 --model MODEL", "-3"),
    "dtype": ("x --dtype float8 --model MODEL", "float8"),
    "device": ("x --device abacus --model MODEL", "abacus"),
    "threads": ("x --threads 0 --model MODEL", "0"),
    "logprobs": ("x --logprobs 9999 --json --model MODEL", "9999"),
    "logprobs without json": ("x --logprobs 2 --model MODEL", "--json"),
    "context": ("x --context 65 --model MODEL", "65"),
    "system with raw": ("x --system s --raw --model MODEL", "--raw"),
    "no schema": ("x --json-schema TMP/nowhere.json", "nowhere.json cannot be read"),
    "schema that is no JSON": ("x --json-schema TMP/notes.txt", "notes.txt is no JSON"),
    "beams that are alike": ("x --beams 2 --deterministic --model MODEL", "leave it out, or --deterministic"),
    "beams and drafts": ("x --beams 2 --draft ngram --model MODEL", "leave out --draft"),
    "replicas of one answer": ("x --replicas 2 --model MODEL", "--replicas goes with --prompts"),
    "no replicas": ("--prompts TMP/notes.txt --replicas 0 --model MODEL", "--replicas is 0, but must be 1 or more"),
    "schema and regex": ("x --json-schema TMP/notes.txt --regex a", "not allowed with"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line_and_exit_code_2(capsys, folder, tmp_path, name):
    (tmp_path / "notes.txt").write_text("not a model")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (2**60).to_bytes(8, "little") * 2)
    command, mentions = WRONG[name]
    words = {"LONG": "x" * 100}
    argv = [words.get(w, w).replace("MODEL", folder).replace("TMP", str(tmp_path)) for w in shlex.split(command)]
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and mentions in err, err


def test_damaged_weights_are_one_line_and_exit_code_2(capsys, tmp_path):
    code, out, err = run(capsys, "x", "--model", tiny_folder(tmp_path / "m", scale=float("nan")))
    found, error = err.splitlines()
    assert code == 2 and found.startswith("m: llama, ") and error.startswith("error: ") and "not finite" in error


def test_debug_shows_the_traceback(folder):
    with pytest.raises(ValueError):
        generate.main(["x", "--model", folder, "--temperature", "-1", "--debug"])


@pytest.mark.parametrize("flags, note", [
    (["--top-k", "3"], "note: --top-k changes nothing at temperature 0; add --temperature"),
    (["--n", "2"], "note: --n changes nothing at temperature 0; add --temperature"),
    (["--beams", "2", "--seed", "1"], "note: --seed changes nothing with --beams, which draws nothing"),
    (["--top-k", "3", "--temperature", "0"], None), (["--top-k", "3", "--temperature", "1"], None), ([], None),
    (["--top-k", "3", "--quiet"], None), (["--beams", "2", "--seed", "1", "--quiet"], None), (["--beams", "2"], None)])
def test_flags_that_change_nothing_are_told(capsys, folder, flags, note):
    code, _, err = run(capsys, "hello", "--model", folder, "--max-tokens", "2", *flags)
    assert code == 0 and [line for line in err.splitlines() if "changes nothing" in line] == ([note] if note else [])


def test_what_cannot_stream_is_said(capsys, folder, monkeypatch):
    """A program that was started with a closed output, or with a closed input and no prompt."""
    for stream, argv in (("stdin", []), ("stdout", ["hello"])):
        with monkeypatch.context() as closed:
            closed.setattr(sys, stream, None)
            assert generate.main([*argv, "--model", folder]) == 2
        assert capsys.readouterr().err == "error: standard output, or standard input without a prompt, is closed\n"


def test_a_second_ctrl_c_ends_the_program(capsys, folder, monkeypatch):
    """The first ends the answer after its token, with what there is; and afterwards Ctrl-C is what it was before."""
    before, begin, times = signal.getsignal(signal.SIGINT), generate.Answer.begin, 1

    def interrupted(answer):
        begin(answer)
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(generate.Answer, "begin", interrupted)
    flags = ("hello", "--model", folder, "--max-tokens", "9")
    code, out, err = run(capsys, *flags)
    assert code == 130 and out == "\n" and err.rstrip().endswith("| abort")
    times = 2
    code, out, err = run(capsys, *flags)
    assert (code, out) == (130, "") and "abort" not in err and "Traceback" not in err
    assert signal.getsignal(signal.SIGINT) == before


def test_help_shows_defaults_and_examples(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and out.count("python generate.py") == 8
    flags = """--model --raw --system --max-tokens --temperature --top-k --top-p --min-p --repetition-penalty
        --presence-penalty --frequency-penalty --seed --stop --logprobs --dtype --device --threads --json --quiet
        --debug"""
    assert all(flag in out for flag in flags.split())
    assert out.count("default: ") >= 12


# ------------------------------------------------------------------ a conversation


def talk(capsys, monkeypatch, folder, lines: list[str], *flags) -> tuple[int, str, str]:
    """A conversation at a terminal: `lines` are typed one after the other, then Ctrl-D."""
    class Terminal:
        def isatty(self):
            return True

    typed = iter(lines)

    def fake_input(prompt=""):
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", fake_input)
    return run(capsys, "--model", folder, *flags)


def test_a_conversation_computes_only_the_new_turn(capsys, monkeypatch, tmp_path):
    folder = tiny_folder(tmp_path / "m", max_position_embeddings=1024)
    code, out, err = talk(capsys, monkeypatch, folder, ["hi", "", "and then?"], "--max-tokens", "8")
    lines = [line for line in err.splitlines() if "prompt" in line]
    assert code == 0 and len(lines) == 2
    assert "cached" not in lines[0] and "cached" in lines[1]


@pytest.mark.parametrize("flags, mentions", [(["--top-p", "7"], "7"), (["--max-tokens", "-1"], "-1"),
                                             (["--raw"], "--raw"), (["--json"], "--json"),
                                             (["--system", "x" * 2000], "2029 tokens")])
def test_a_conversation_that_cannot_work_does_not_begin(capsys, monkeypatch, folder, flags, mentions):
    code, out, err = talk(capsys, monkeypatch, folder, ["hi"], *flags)
    assert code == 2 and out == "" and err.count("\n") == 1 and mentions in err


def test_ctrl_c_at_the_prompt_or_before_the_first_token_costs_no_history(capsys, monkeypatch, tmp_path):
    folder = tiny_folder(tmp_path / "m", max_position_embeddings=1024)
    asked, encode = [], generate.LLM.encode_chat
    monkeypatch.setattr(generate.LLM, "encode_chat", lambda llm, m: asked.append(list(m)) or encode(llm, m))
    begin, aborted = generate.Answer.begin, []

    def abort_second(answer):
        begin(answer)
        if "two" in asked[-1][-1]["content"] and not aborted:
            aborted.append(1)
            answer.abort = True

    monkeypatch.setattr(generate.Answer, "begin", abort_second)
    code, _, err = talk(capsys, monkeypatch, folder, ["one", KeyboardInterrupt, "two", "three"], "--max-tokens", "5")
    assert code == 0 and aborted
    roles = [m["role"] for m in asked[-1]]
    assert roles == ["user", "assistant", "user"] and [m["content"] for m in asked[-1]][::2] == ["one", "three"]


def test_each_turn_of_a_conversation_has_its_own_randomness(capsys, monkeypatch, tmp_path):
    """All of it from one seed: again the same conversation, and not the same draws in each turn."""
    folder = tiny_folder(tmp_path / "m", max_position_embeddings=1024)
    seeds, answer = [], generate.LLM.answer
    monkeypatch.setattr(generate.LLM, "answer", lambda llm, ids, **how: seeds.append(how["seed"]) or answer(
        llm, ids, **how))
    said = []
    for seed in (["--seed", "5"], ["--seed", "5"], ["--seed", "6"], []):
        code, out, _ = talk(capsys, monkeypatch, folder, ["hi", "hi", "hi"], "--max-tokens", "6", "--temperature", "1",
                            "--quiet", *seed)
        assert code == 0
        said.append(out)
    assert said[0] == said[1] != said[2] and len(set(seeds[1:4])) == 3 and seeds[1:4] == seeds[5:8]
    assert seeds[-3:] == [None] * 3


def test_debug_shows_the_traceback_of_a_turn(capsys, monkeypatch, folder):
    with pytest.raises(ValueError, match="tokens, but the context is 64"):
        talk(capsys, monkeypatch, folder, ["x" * 100], "--debug")
    capsys.readouterr()
    assert talk(capsys, monkeypatch, folder, ["x" * 100])[0] == 0


def test_a_long_conversation_drops_its_oldest_turns_and_says_so(capsys, monkeypatch, tmp_path):
    folder = tiny_folder(tmp_path / "m", max_position_embeddings=200)
    code, out, err = talk(capsys, monkeypatch, folder, ["word " * 6, "more " * 6, "last " * 6, "x" * 500, "fine"],
                          "--max-tokens", "10", "--system", "S")
    assert code == 0
    assert "dropped: the oldest" in err and "200" in err
    assert err.count("error: ") == 1 and "tokens, but the context is 200" in err, "one turn too long is not fatal"
    assert "cached" in err.splitlines()[-1], "and it costs no history"
    assert err.count(" | prompt ") == 4


# ------------------------------------------------------------------ a file of prompts


def records(path) -> dict:
    with open(path, encoding="utf-8") as f:
        found = [json.loads(line) for line in f]
    keys = [(r["id"], r["input"]) for r in found]
    assert len(set(keys)) == len(keys), "an answer is written once"
    return {record["id"]: record for record in found}


def test_a_file_of_prompts(capsys, monkeypatch, folder, llm, tmp_path):
    """Every line is answered as it would be alone, a broken one is named, whatever its own parameters are."""
    asked, out = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    lines = [{"prompt": "hello"}, {"prompt": "raw", "raw": True, "id": "r", "max_tokens": 3, "logprobs": 1},
             {"prompt_ids": list(b"hello"), "temperature": 1.0, "seed": 5, "n": 3}, {"prompt": "x", "temperature": -1},
             {"messages": [{"role": "user", "content": "hello"}], "at": 0.3, "id": "late"}, {"prompt": "x" * 70}]
    asked.write_text("\n".join(["{broken", *map(json.dumps, lines)]) + "\n")
    code, text, err = run(capsys, "--model", folder, "--dtype", "float64", "--max-tokens", "9", "--prompts", str(asked),
                          "--out", str(out))
    found = records(out)
    assert code == 1 and text == "" and list(found)[-1] == "late" and len(found) == 7
    assert found[None]["finish_reason"] == "error" and "line 1: not JSON" in found[None]["error"]
    assert "error: line 1" in err
    assert "temperature is -1" in found[5]["error"] and "tokens, but the context is 64" in found[7]["error"]
    hello, = llm.generate("hello", max_tokens=9)
    for id in (2, "late"):
        assert found[id]["samples"] == [{"ids": hello.ids, "text": hello.text, "finish_reason": hello.finish_reason}]
    raw, = llm.generate("raw", raw=True, max_tokens=3)
    assert found["r"]["samples"][0]["ids"] == raw.ids and len(found["r"]["samples"][0]["logprobs"]) == 3
    several, = llm.generate("hello", raw=True, max_tokens=9, n=3, temperature=1.0, seed=5)
    assert [s["ids"] for s in found[4]["samples"]] == [s.ids for s in several.samples]
    assert found["late"]["ttft_s"] > 0 and found[2]["prompt_tokens"] == len(hello.prompt_ids)
    assert "\n6 requests, " in err and "TTFT" in err and "3 errors" in err and "preemptions" in err


def test_answers_that_keep_to_a_form(capsys, folder, tmp_path):
    """Flags for all, a line's own form in place of theirs; a form that cannot be is a line's own error."""
    pytest.importorskip("llguidance")
    schema, asked, out = tmp_path / "form.json", tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    schema.write_text('\ufeff{"enum": ["yes", 12]}', encoding="utf-8")
    flags = ["--model", folder, "--dtype", "float64", "--quiet"]
    code, text, _ = run(capsys, "hello", "--regex", "(ab|ba){3}c", *flags)
    assert code == 0 and re.fullmatch("(ab|ba){3}c\n", text)
    code, text, err = run(capsys, "hello", "--regex", "a{50}", "--max-tokens", "3", *flags[:-1])
    assert code == 0 and "note: the answer was cut before it had the form" in err
    assert "was cut" not in run(capsys, "hello", "--regex", "a{2}", *flags[:-1])[2]
    code, text, _ = run(capsys, "hello", "--json-schema", str(schema), "--json", *flags)
    assert code == 0 and json.loads(json.loads(text)["text"]) in ("yes", 12)
    for wrong, mentions in ((["--regex", "("], "regex cannot be followed"), (["--regex", "a" * 5_000], "may be 4,096")):
        code, text, err = run(capsys, "hello", *wrong, *flags)
        assert (code, text) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and mentions in err
    lines = [{"prompt": "a"}, {"prompt": "b", "regex": "x{4}"}, {"prompt": "c", "json_schema": {"const": "é"}},
             {"prompt": "d", "json_schema": {"type": "strin"}}, {"prompt": "e", "regex": "a", "json_schema": {}},
             {"prompt": "f", "regex": "[0-9]{2}", "temperature": 2, "seed": 1, "n": 3}]
    asked.write_text("\n".join(map(json.dumps, lines)))
    flags += ["--prompts", str(asked), "--out", str(out), "--json-schema", str(schema)]
    code, _, err = run(capsys, *flags)
    found = records(out)
    assert code == 1 and json.loads(found[1]["samples"][0]["text"]) in ("yes", 12)
    assert found[2]["samples"][0]["text"] == "xxxx" and json.loads(found[3]["samples"][0]["text"]) == "é"
    assert found[4]["error"] == "line 4: json_schema cannot be followed: Invalid type: strin"
    assert found[5]["error"].startswith("line 5: json_schema and regex are both given")
    assert all(re.fullmatch("[0-9]{2}", s["text"]) for s in found[6]["samples"])
    schema.write_text('{"enum": ["yes"]}')
    code, _, err = run(capsys, *flags, "--resume")
    last = {r["id"]: r for r in map(json.loads, out.read_text().splitlines())}  # what failed was tried again
    assert json.loads(last[1]["samples"][0]["text"]) == "yes", "another form is another question"


def test_without_llguidance_the_error_says_how_to_get_it(capsys, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    code, text, err = run(capsys, "hello", "--regex", "a", "--model", folder)
    assert (code, text) == (2, "") and "pip install llguidance" in err and err.count("\n") == 1


def test_a_file_of_prompts_is_resumed(capsys, monkeypatch, folder, tmp_path):
    """What has been answered with the same parameters is not answered again; what is cut short is."""
    asked, out = tmp_path / "asked.txt", tmp_path / "answers.jsonl"
    asked.write_text("one\n\ntwo\nthree\n")
    flags = ["--model", folder, "--max-tokens", "4", "--prompts", str(asked), "--out", str(out)]
    assert run(capsys, *flags)[0] == 0
    first = records(out)
    assert list(first) == [1, 3, 4]
    code, _, err = run(capsys, *flags)
    assert code == 2 and "--resume" in err and records(out) == first, "nothing is overwritten"
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    code, _, err = run(capsys, *flags, "--resume")
    assert code == 0 and "2 were answered before" in err
    again = records(out)
    assert {i: r["samples"] for i, r in again.items()} == {i: r["samples"] for i, r in first.items()}
    code, _, err = run(capsys, *flags, "--resume", "--max-tokens", "5")
    assert "3 had answers to other prompts, options or models, and were asked anew" in err
    assert "were answered before" not in err and [len(r["samples"][0]["ids"]) for r in records(out).values()] == [5] * 3


@pytest.mark.parametrize("replicas", ["1", "2"])
def test_a_file_that_cannot_be_read_to_its_end(capsys, monkeypatch, folder, tmp_path, replicas):
    """The thread that reads ahead hands on its error, in one line; what was answered before stays."""
    asked, out = tmp_path / "asked.txt", tmp_path / "answers.jsonl"
    asked.write_text("one\n")
    read = prompts.read_prompts

    def torn(path):
        yield from read(path)
        raise OSError("the disk is gone")

    monkeypatch.setattr(prompts, "read_prompts", torn)
    code, _, err = run(capsys, "--model", folder, "--max-tokens", "2", "--prompts", str(asked), "--out", str(out),
                       "--replicas", replicas, "--quiet")
    assert code == 2 and err == "error: the disk is gone\n" and out.exists()
    monkeypatch.undo()
    assert run(capsys, "--model", folder, "--max-tokens", "2", "--prompts", str(asked), "--out", str(out), "--resume",
               "--quiet")[0] == 0 and list(records(out)) == [1]


def test_another_models_answers_are_not_taken_for_ours(capsys, tmp_path):
    """Two folders of one name: what was asked is the same, who answers is not."""
    asked, out = tmp_path / "asked.txt", tmp_path / "answers.jsonl"
    asked.write_text("one\ntwo\n")
    folders = [tiny_folder(tmp_path / str(scale) / "model", scale=scale) for scale in (1.0, 0.5)]
    for folder, fresh in ((folders[0], 2), (folders[0], 0), (folders[1], 2)):
        flags = ["--model", folder, "--max-tokens", "2", "--prompts", str(asked), "--out", str(out), "--resume"]
        before = out.read_text().count("\n") if out.exists() else 0
        assert run(capsys, *flags)[0] == 0 and out.read_text().count("\n") == before + fresh


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("replicas", ["1", "2"])
def test_the_end_does_not_wait_for_standard_input(folder, replicas):
    """An error while somebody still may type: the thread that reads on must not abort the interpreter."""
    command = [sys.executable, str(ROOT / "generate.py"), "--model", folder, "--max-tokens", "2", "--prompts", "-",
               "--out", "/dev/full", "--replicas", replicas]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        job.stdin.write(b"hi\n")
        job.stdin.flush()
        code, said = job.wait(120), job.stderr.read().decode()
    assert code == 2 and "/dev/full cannot be written" in said and "Fatal" not in said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_answers_that_cannot_be_written_end_the_job(capsys, folder, tmp_path):
    asked = tmp_path / "asked.txt"
    asked.write_text("one\ntwo\n")
    code, out, err = run(capsys, "--model", folder, "--max-tokens", "2", "--prompts", str(asked), "--out", "/dev/full")
    assert code == 2 and "/dev/full cannot be written: No space left" in err and "--resume" in err


def test_standard_input_is_answered_as_it_comes(folder):
    """The second line comes when the first is answered: a job does not wait for the end of its input."""
    process = subprocess.Popen([sys.executable, str(ROOT / "generate.py"), "--model", folder, "--max-tokens", "2",
                                "--prompts", "-", "--quiet"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for i in (1, 2):
        process.stdin.write("hello\n")
        process.stdin.flush()
        assert select.select([process.stdout], [], [], 120)[0], "no answer"
        assert json.loads(process.stdout.readline())["line"] == i
    process.stdin.close()
    assert process.wait(120) == 0


# ------------------------------------------------------------------ speculative decoding


def test_drafts_change_nothing_but_the_speed(capsys, folder, llm):
    """By n-grams, by the model itself, by one with another context: the same tokens, and the figures are told."""
    wanted, = llm.generate("abcabcabc", raw=True, max_tokens=20, ignore_eos=True)
    for flags in (["--draft", "ngram"], ["--draft", "ngram", "--k", "3"], ["--draft", folder, "--k", "4"]):
        code, out, err = run(capsys, "abcabcabc", "--raw", "--model", folder, "--dtype", "float64", "--max-tokens",
                             "20", "--ignore-eos", *flags, "--compare")
        assert code == 0 and out == wanted.text + "\n"
        assert "tokens a pass" in err and "times as fast; the same tokens" in err
        assert flags[1] == "ngram" or "100% accepted" in err


def test_one_token_has_no_speed_to_compare(capsys, folder):
    code, _, err = run(capsys, "abc", "--raw", "--model", folder, "--max-tokens", "1", "--draft", "ngram", "--compare")
    assert code == 0 and "too short an answer to compare speeds" in err and "times as fast" not in err


def test_a_draft_model_must_have_the_vocabulary(folder, tmp_path):
    other = tiny_folder(tmp_path / "other")
    vocabulary = Path(other) / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace('"a": 97', '"a": 98').replace('"b": 98', '"b": 97', 1))
    with pytest.raises(ValueError, match=r"cannot draft for .*token id 97 is b'a' for the target but b'b'"):
        generate.load(folder, draft=other)
    for k in (0, 65, True, "many", 2.0):
        with pytest.raises(ValueError, match=r"k is .* but must be 'auto' or a number of drafts from 1 to 64"):
            generate.load(folder, draft="ngram", k=k)


@pytest.mark.parametrize("flags, mentions", [
    (["--prompts", "x", "hello"], "leave out the prompt"), (["--prompts", "x", "--json"], "--json"),
    (["--out", "x", "hello"], "--prompts"), (["--resume", "hello"], "--prompts"),
    (["--prompts", "no such file"], "cannot be read"), (["--max-batch", "0", "hello"], "--max-batch is 0"),
    (["--token-budget", "0", "hello"], "--token-budget is 0"), (["--n", "17", "hello"], "n is 17"),
    (["--prompts", __file__, "--temperature", "-1"], "temperature is -1"), (["--k", "3", "hello"], "--draft"),
    (["--draft", "ngram", "--k", "0", "hello"], "k is 0"), (["--draft", "nowhere/model.gguf", "hello"], "nowhere"),
    (["--compare", "--draft", "ngram", "--json", "hello"], "--compare")])
def test_what_cannot_be_a_job_is_refused(capsys, folder, flags, mentions):
    code, out, err = run(capsys, *flags, "--model", folder, "--quiet")
    assert code == 2 and out == "" and err.count("\n") == 1 and mentions in err


# ------------------------------------------------------------------ the command line, as a process


def start(*argv, **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(ROOT / "generate.py"), *argv], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, **options)


def test_a_job_that_is_killed_and_resumed_answers_every_line_once(folder, tmp_path):
    asked, out = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    lines = [{"prompt": f"number {i}", "id": i, "ignore_eos": True} for i in range(40)]
    asked.write_text("\n".join(map(json.dumps, lines)))
    flags = ("--model", folder, "--max-tokens", "30", "--max-batch", "2", "--prompts", str(asked), "--out", str(out))
    process, deadline = start(*flags), time.monotonic() + 120
    while time.monotonic() < deadline and (not out.exists() or out.read_bytes().count(b"\n") < 3):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    before = out.read_bytes()
    assert 3 <= before.count(b"\n") < 40, "killed half-way"
    process = start(*flags, "--resume")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "were answered before" in err
    ids = [json.loads(line)["id"] for line in out.read_text().splitlines()]
    assert sorted(ids) == list(range(40)) and out.read_bytes().startswith(before[: before.rfind(b"\n") + 1])


def test_ctrl_c_ends_the_answer_with_dignity(default_gguf):
    process = start("Count to one thousand, one number a line.", "--max-tokens", "4000", "--temperature", "1")
    assert process.stdout.read(1), "no first character"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "abort" in err and "Traceback" not in err


def test_ctrl_c_while_starting_up_shows_no_traceback(default_gguf):
    for seconds in (0.2, 0.6, 1.2):
        process = start("hi", "--max-tokens", "2000", "--temperature", "1")
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (130, -signal.SIGINT) and "Traceback" not in err and "terminate" not in err


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_closed_standard_streams_are_one_line(folder, closed):
    prompt = "x" if closed == ">&-" else ""
    command = f"exec {sys.executable} {ROOT / 'generate.py'} {prompt} --model {folder} --max-tokens 2"
    result = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and result.stderr.startswith("error: ") and "closed" in result.stderr
    assert result.stderr.count("\n") == 1


def test_json_survives_a_terminal_that_is_not_utf_8(folder):
    command = [sys.executable, str(ROOT / "generate.py"), "x", "--model", folder, "--json", "--quiet", "--max-tokens",
               "9", "--temperature", "2", "--seed", "3"]
    results = []
    for encoding in ("utf-8", "latin-1"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(command, capture_output=True, timeout=60, env=environment)
        results.append(json.loads(done.stdout.decode(encoding))["text"])
    assert results[0] == results[1]


def test_a_closed_pipe_is_no_error(default_gguf):
    process = start("Count to one hundred.", "--max-tokens", "60", "--quiet")
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == ""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux to tell the peak of one program")
def test_peak_memory_of_the_default_model(default_gguf):
    """One answer in the default dtype stays below 1.2 GB, Python and torch included."""
    code = ("import re, sys, generate;"
            "code = generate.main(['Why is the sky blue?', '--max-tokens', '24', '--quiet']);"
            "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]); sys.exit(code)")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[-1]) * 1024 < 1.2e9


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_conversation_at_a_real_terminal(default_gguf):
    leader, follower = os.openpty()
    process = subprocess.Popen([sys.executable, str(ROOT / "generate.py"), "--max-tokens", "12"], stdin=follower,
                               stdout=follower, stderr=follower)
    os.close(follower)

    def screen_until(mark: bytes, seconds: float = 60) -> bytes:
        """What the terminal shows up to the first `mark`, or up to the program's end if mark is empty."""
        seen, deadline = b"", time.time() + seconds
        while time.time() < deadline and not (mark and mark in seen):
            if select.select([leader], [], [], 0.5)[0]:
                try:
                    seen += os.read(leader, 4096)
                except OSError:  # how Linux says that the other side is closed
                    break
        return seen

    try:
        assert b"> " in screen_until(b"> ")
        os.write(leader, b"Say hello.\n")
        assert b"tokens/s" in screen_until(b"> ")
        os.write(leader, b"And again?\n")
        assert b"cached" in screen_until(b"cached")
        screen_until(b"> ")
        os.write(leader, b"\x04")
        screen_until(b"")
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        os.close(leader)


# ------------------------------------------------------------------ the KV cache's options


def dense_greedy(llm, prompt, n):
    """n greedy tokens by whole passes of the model, without a cache."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            ids.append(int(llm.model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt):]


@pytest.mark.parametrize("changes", [{}, {"model_type": "mistral", "sliding_window": 5}], ids=["full", "window"])
def test_a_second_prompt_with_the_same_beginning_computes_only_the_rest(tmp_path, changes):
    """K01, vllm #11186: whole blocks of an earlier prompt are found again, never all of a prompt; the answer is that of
    dense passes without any cache, with a sliding window too."""
    llm = generate.load(tiny_folder(tmp_path / "m", eos_token_id=None, **changes), dtype="float64")
    first = [5 + 7 * i % 200 for i in range(33)]
    for prompt, cached in ((first, 0), (first, 32), ([*first[:20], 9, 9], 16), (first[:32], 16), ([1, *first], 0)):
        answer = llm.answer(prompt, max_tokens=6, temperature=0)
        list(answer)
        assert answer.cached == cached and answer.ids == dense_greedy(llm, prompt, 6)
        llm.cache.check()


def test_an_int8_or_fp8_cache_is_smaller_and_near(tmp_path):
    folder = tiny_folder(tmp_path / "m")
    prompt, found = list(range(5, 45)), {}
    for kv in ("auto", "int8", "fp8"):
        llm = generate.load(folder, dtype="float32", kv_dtype=kv)
        answer = llm.answer(prompt, max_tokens=1, temperature=0, logprobs=270)
        list(answer)
        top = dict(answer.logprobs[0]["top"])
        found[kv] = torch.tensor([top[i] for i in range(270)])
        assert llm.cache.k[0].element_size() == (4 if kv == "auto" else 1)
    assert 0 < (found["int8"] - found["auto"]).abs().max() < 0.05
    assert (found["int8"] - found["auto"]).norm() < (found["fp8"] - found["auto"]).norm() < 1


def test_the_pool_is_sized_by_memory(tmp_path):
    """The context shrinks to what fits, one that is asked for is refused with the remedy, and nothing is preset."""
    folder = tiny_folder(tmp_path / "m", max_position_embeddings=4096)
    token = 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, dim, float32
    five_blocks = 5 * 16 * token / 2**30  # one is for the writes of padded slots
    llm = generate.load(folder, dtype="float32", kv_memory=five_blocks)
    assert llm.context == 64 and llm.cache.n_blocks == 4
    with pytest.raises(ValueError, match=r"holds 64 tokens, fewer than the 65 .*--kv-memory.*--kv-dtype int8"):
        generate.load(folder, dtype="float32", context=65, kv_memory=five_blocks)
    with pytest.raises(ValueError, match="but the budget is 2048"):
        generate.load(folder, dtype="float32", kv_memory=8 * token / 2**30)
    for wrong in ({"kv_memory": 0}, {"kv_memory": float("nan")}, {"kv_dtype": "int4"}):
        with pytest.raises(ValueError, match=r"KV cache of|kv_dtype 'int4'"):
            generate.load(folder, **wrong)
    with pytest.raises(ValueError, match="dtype 'float8' is unknown; known are auto, float32"):
        generate.load(folder, dtype="float8")
    with pytest.raises(ValueError, match="compiled decode steps are for one process on a CPU"):
        generate.load(folder, compile=1, kv_dtype="int8")
    roomy = generate.load(folder, dtype="float32", max_batch=4)
    assert roomy.context == 4096 and roomy.cache.n_blocks == 4 * 256, "as many contexts as can be in use at once"


def test_threads_are_physical_cores(monkeypatch):
    """Of eight logical processors, two to a core, this process may use five, on three cores."""
    siblings = {0: "0,4", 1: "1,5", 2: "2,6", 4: "0,4", 5: "1,5"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(siblings), raising=False)
    monkeypatch.setattr(Path, "read_text", lambda self: siblings[int(re.findall("cpu([0-9]+)", str(self))[0])])
    assert generate._cores() == 3
    monkeypatch.setattr(Path, "read_text", lambda self: os.stat("no such file"))
    assert generate._cores() == torch.get_num_threads()
