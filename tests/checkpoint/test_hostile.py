"""Checkpoints that were damaged, or made to do harm: refused before anything changes, or loaded as they were saved."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkpoint import resume_cases as cases
from longshore.checkpoint.boxes import METADATA, BoxReader, WantedBoxes, parsed_metadata
from longshore.checkpoint.files import is_file_name, read_json
from longshore.checkpoint.folder import MANIFEST
from longshore.checkpoint.optimizer_state import checked_about
from longshore.checkpoint.rank_group import RankGroup
from longshore.checkpoint.training_state import find
from longshore.checkpoint.values import Values, decode, read_values
from longshore.errors import CheckpointError
from longshore.layout.boxes import Box

TAG = "victim"
STATE, RANK = "state", "rank-00000"
MODEL_FILE = "model-00000-of-00001.safetensors"
MEMORY_BYTES = 1 << 29
"""More than the process has already: all files together are some 50 KB."""
SLOWEST_S = 10.0

Files = dict[str, bytes]


class Raw(str):
    """Stands in JSON as it is, without quotes."""


DEEP = Raw("[" * 100_000 + "]" * 100_000)
HOSTILE: list[Any] = [
    *(None, True, -1, 0, 1, 7, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 1.5),
    *(float("nan"), float("inf"), -float("inf"), Raw("1e999"), Raw("-1e999"), Raw("1" * 5000), Raw("01"), DEEP),
    *("", "x", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "\ud800", ".", "..", "x" * 10_000, "a\nb", "/dev/zero"),
    *("F64", "I8", "F4", "BOOL", "float32", MANIFEST, METADATA, MODEL_FILE, "pipe", "not there", "latest"),
    *([], {}, [[]], [-1], [2**62] * 3, [0] * 65, [2**40, 0], [1.5], [True], ["5"], [None] * 1000),
    *(
        {"$tensor": "state.0"},
        {"$tensor": "nothing"},
        {"$tensor": 5},
        {"$float": []},
        {"$float": {}},
        {"$float": "inf"},
    ),
    *(
        {"$float32": "nan"},
        {"$float32": 0.5},
        {"$tuple": 5},
        {"$tuple": []},
        {"$items": [[1, 2], [1, 3]]},
        {"$items": [[[], 1]]},
        {"$items": [1]},
        {"$other": 1},
    ),
    [{"$tensor": "state.0"}] * 1000,
]


def dumped(content: Any) -> bytes:
    """JSON, with :class:`Raw` and doubled entries (a list of pairs that begins with ``@twice``) as they are."""
    raw: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            raw.append(value)
            return f"@raw{len(raw) - 1}@"
        if isinstance(value, dict):
            return {key: marked(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [marked(entry) for entry in value]
        return value

    text = json.dumps(marked(content), separators=(",", ":"))
    for place, entry in enumerate(raw):
        text = text.replace(f'"@raw{place}@"', entry)
    return text.encode()


# -- what is done to files ----------------------------------------------------


def nodes(value: Any, key: Any = None, holder: Any = None) -> Iterator[tuple[Any, Any, Any]]:
    if holder is not None:
        yield holder, key, value
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for inner, entry in list(entries):
        yield from nodes(entry, inner, value)


def mutate_tree(rng: random.Random, content: Any) -> Any:
    """Some entry is another, gone, twice there, elsewhere, or under another name."""
    content = copy.deepcopy(content)
    found = list(nodes(content))
    for _ in range(rng.choice((1, 1, 1, 3))):
        holder, key, value = rng.choice(found)
        if isinstance(holder, list) and key >= len(holder):
            continue
        how = rng.randrange(7)
        if how == 0:
            with contextlib.suppress(KeyError):
                del holder[key]
        elif how == 1 and isinstance(holder, dict):
            holder[str(rng.choice(HOSTILE))[:100]] = holder.pop(key, None)
        elif how == 2 and isinstance(holder, list):
            holder.append(copy.deepcopy(value))
        elif how == 3:
            holder[key] = copy.deepcopy(rng.choice(found)[2])
        elif how == 4 and isinstance(value, int):
            holder[key] = value + rng.choice((-1, 1, 2, 2**32, 2**63))
        elif how == 5 and isinstance(holder, dict):
            other = json.dumps(rng.choice((value, 0, "x", None))) if not isinstance(value, Raw) else "0"
            holder[key] = Raw(f"{dumped(value).decode()},{json.dumps(key)}:{other}")
        else:
            holder[key] = rng.choice(HOSTILE)
    return content


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    if not content:
        return rng.randbytes(10)
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.choice((1, 8, 100)))
    how = rng.randrange(7)
    if how == 0:
        return content[:start]
    if how == 1:
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 4))):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    fill = (content[start:end] * 2, b"", bytes(end - start), rng.randbytes(end - start))
    if how < 6:
        return content[:start] + fill[how - 2] + content[end:]
    return content + rng.choice((b"\0", b"}", rng.randbytes(100)))


def mutate_head(rng: random.Random, content: bytes) -> bytes:
    """The header of a safetensors file, or its length."""
    length = int.from_bytes(content[:8], "little")
    if rng.random() < 0.2:
        length = rng.choice((0, 1, length - 1, length + 1, len(content), 10**8 + 1, 2**63, 2**64 - 1))
        return length.to_bytes(8, "little") + content[8:]
    try:
        head = dumped(mutate_tree(rng, json.loads(content[8 : 8 + length])))
    except ValueError:
        return content[:-1]
    return len(head).to_bytes(8, "little") + head + content[8 + length :]


def mutate_chunks(rng: random.Random, content: bytes) -> bytes:
    """A tensor is cut into boxes that overlap, lack something, lie elsewhere, or are each other."""
    metadata = json.loads(content)
    name = rng.choice([name for name, entry in metadata["tensors"].items() if entry["chunks"] and entry["shape"]])
    entry = metadata["tensors"][name]
    chunk = rng.choice(entry["chunks"])
    other = rng.choice([each for other in metadata["tensors"].values() for each in other["chunks"]])
    dim = rng.randrange(len(entry["shape"]))
    half = copy.deepcopy(chunk)
    half["offsets"][dim] += rng.choice((0, 1, chunk["sizes"][dim] // 2))
    half["sizes"][dim] = max(0, half["sizes"][dim] - rng.choice((0, 1, chunk["sizes"][dim] // 2)))
    how = rng.randrange(7)
    if how == 0:
        entry["chunks"].append(half)
    elif how == 1:
        entry["chunks"][0] = half
    elif how == 2:
        entry["chunks"].append({**chunk, "sizes": [0] * len(entry["shape"])})
    elif how == 3:
        chunk["tensor"], chunk["file"] = other["tensor"], other["file"]
    elif how == 4:
        chunk["file"] = rng.choice(["not there", "pipe", "extra", MANIFEST, f"{STATE}.json", f"{STATE}.safetensors"])
    elif how == 5:
        entry["dtype"] = rng.choice(["F64", "F32", "BF16", "F16", "I32", "U8", "BOOL"])
    else:
        entry["shape"], chunk["sizes"] = ([2**20] * 2,) * 2
    return dumped(metadata)


def replace_file(rng: random.Random, path: Path, outside: Path) -> None:
    """Something else is in the place of a file."""
    content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    how = rng.randrange(8)
    if how == 0:
        outside.write_bytes(content)
        path.symlink_to(outside)
    elif how == 1:
        path.symlink_to(rng.choice(("/dev/zero", "/not/there", path.name, MANIFEST)))
    elif how == 2:
        os.mkfifo(path)
    elif how == 3:
        path.mkdir()
    elif how == 4:
        try:
            os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            path.symlink_to("/dev/zero")
    elif how == 5:
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    elif how == 6:
        path.write_bytes(rng.randbytes(100))


class Damage(NamedTuple):
    """What is done in a case."""

    name: str
    apply: Callable[[random.Random, Files], None]
    """To the contents."""
    lay: Callable[[random.Random, Path], None] | None = None
    """To the files in the folder, afterwards."""
    rehash: bool = False
    """The manifest has the sizes and checksums of what was changed: what is behind them has to hold alone."""


def _one(names: Callable[[str], bool], change: Callable[[random.Random, bytes], bytes]) -> Callable[..., None]:
    def apply(rng: random.Random, files: Files) -> None:
        name = rng.choice(sorted(filter(names, files)))
        files[name] = change(rng, files[name])

    return apply


def _tree(rng: random.Random, content: bytes) -> bytes:
    return dumped(mutate_tree(rng, json.loads(content)))


def _nothing(rng: random.Random, files: Files) -> None:
    return


def _special(rng: random.Random, folder: Path) -> None:
    name = rng.choice(sorted(path.name for path in folder.iterdir()))
    replace_file(rng, folder / name, folder.parent.parent / "outside")


def _extra(rng: random.Random, folder: Path) -> None:
    name = rng.choice(("extra", "rank-00001.json", "config.json", ".hidden", "lock", "x.safetensors", "pipe"))
    (folder / name).write_bytes(rng.randbytes(10))
    replace_file(rng, folder / name, folder.parent.parent / "outside")


def _pointer(rng: random.Random, folder: Path) -> None:
    latest = folder.parent / "latest"
    text = rng.choice((b"", b"../x", b"\xff\xfe", b"a\0b", b"not there\n", b"victim\n\n", rng.randbytes(2000)))
    latest.write_bytes(text)
    if rng.random() < 0.5:
        replace_file(rng, latest, folder.parent.parent / "outside")


def is_json(name: str) -> bool:
    return name.endswith(".json")


def is_listed(name: str) -> bool:
    return name != MANIFEST


def is_tensors(name: str) -> bool:
    return name.endswith(".safetensors")


DAMAGES = [
    Damage("bytes", _one(lambda name: True, mutate_bytes)),
    Damage("bytes behind the checksum", _one(is_listed, mutate_bytes), rehash=True),
    Damage("manifest", _one(lambda name: name == MANIFEST, _tree)),
    Damage("entries", _one(is_json, _tree)),
    Damage("metadata behind the checksum", _one(lambda name: name == METADATA, _tree), rehash=True),
    Damage("values behind the checksum", _one(lambda name: is_json(name) and is_listed(name), _tree), rehash=True),
    Damage("chunks behind the checksum", _one(lambda name: name == METADATA, mutate_chunks), rehash=True),
    Damage("head behind the checksum", _one(is_tensors, mutate_head), rehash=True),
    Damage("another kind of file", _nothing, _special),
    Damage("a file more", _nothing, _extra),
    Damage("chunks and a file more", _one(lambda name: name == METADATA, mutate_chunks), _extra, rehash=True),
    Damage("latest", _nothing, _pointer),
]


def rehash(files: Files) -> None:
    manifest = json.loads(files[MANIFEST])
    for name in manifest["files"]:
        sha256 = hashlib.sha256(files[name]).hexdigest()
        manifest["files"][name] = {"bytes": len(files[name]), "sha256": sha256}
    files[MANIFEST] = dumped(manifest)


def put_back(files: Files, intact: Files) -> None:
    """Schedulers, loaders and generators of random numbers take what they are given, after the weights."""
    for name, keys in ((f"{STATE}.json", ("engine", "client_state")), (f"{RANK}.json", ("random", "loader"))):
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(files[name])
            if files[name] != intact[name] and isinstance(content, dict):
                files[name] = dumped(content | {key: json.loads(intact[name])[key] for key in keys})


# -- what has to come of it ---------------------------------------------------


class Victim(NamedTuple):
    """An engine in another state than that of the checkpoint, and a second checkpoint of the state it is in."""

    engine: Any
    root: Path
    files: Files
    saved: dict[str, Any]
    """The engine's state in the checkpoint."""
    tensors: dict[str, Tensor]
    """All of the checkpoint."""
    elsewhere: Path
    other: dict[str, Any]

    def lay(self, damage: Damage, rng: random.Random, spare: bool = False) -> bool:
        """The checkpoint, damaged; ``spare``: but for what is read by others than the engine's own checks."""
        files = dict(self.files)
        damage.apply(rng, files)
        if damage.rehash:
            if spare:
                put_back(files, self.files)
            rehash(files)
        shutil.rmtree(self.root)
        folder = self.root / TAG
        folder.mkdir(parents=True)
        (self.root / "latest").write_text(TAG + "\n")
        for name, content in files.items():
            (folder / name).write_bytes(content)
        if damage.lay is not None:
            damage.lay(rng, folder)
        return any(content != self.files[name] for name, content in files.items() if is_listed(name))


def read_tensors(root: Path, names: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """All that loading reads, without an engine."""
    found: dict[str, Tensor] = {}
    crew = RankGroup()
    whole = find(root, TAG, crew)
    assert whole is not None
    values = read_values(whole.path, STATE)
    if values.get("optimizer") is not None:
        checked_about(values["optimizer"], STATE)
    read_values(whole.path, RANK)
    parts = [
        WantedBoxes(name, shape, [Box.whole(shape)], lambda values, name=name: found.update({name: values}))
        for name, shape in names.items()
    ]
    began: list[bool] = []
    try:
        reader = BoxReader(whole.path)
        reader.check(parts)
        began.append(True)
        reader.read(parts)
    except CheckpointError:
        assert not began, "an error that could have been found before reading began"
        raise
    return {name: values.view(names[name]) for name, values in found.items()}


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    folder = tmp_path_factory.mktemp("hostile")
    with cases.engine_of(cases.Setting()) as engine:
        cases.train(engine, 3)
        client = {"best": torch.tensor([0.5]), "pair": (1, float("inf")), "by step": {1: [2, None]}}
        path = engine.save_checkpoint(folder / "root", TAG, client)
        files = {file.name: file.read_bytes() for file in path.iterdir()}
        saved = cases.state_of(engine)
        about = BoxReader(path).tensors
        tensors = read_tensors(folder / "root", {name: entry.shape for name, entry in about.items()})
        cases.train(engine, 2)
        engine.save_checkpoint(folder / "elsewhere", "intact")
        other = cases.state_of(engine)
        assert not torch.equal(saved["embedding.weight master"], other["embedding.weight master"])
        yield Victim(engine, folder / "root", files, saved, tensors, folder / "elsewhere", other)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Little memory, and no hanging."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    faulthandler.dump_traceback_later(300, exit=True)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        faulthandler.cancel_dump_traceback_later()


def check_reading(victim: Victim, damage: Damage) -> bool:
    """Returns whether it was refused."""
    shapes = {name: tuple(tensor.shape) for name, tensor in victim.tensors.items()}
    try:
        found = read_tensors(victim.root, shapes)
    except CheckpointError:
        return True
    for name, tensor in victim.tensors.items():
        assert found[name].shape == tensor.shape, name
        assert found[name].dtype == tensor.dtype or not tensor.numel(), name  # of nothing there is nothing to read
        # Behind the checksum, other values may be what was saved.
        assert damage.rehash or torch.equal(found[name], tensor), name
    return False


def check_loading(victim: Victim, damage: Damage) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            path, _ = victim.engine.load_checkpoint(victim.root, TAG)
    except CheckpointError:
        cases.check_same(cases.state_of(victim.engine), victim.other)
        return True
    assert path == victim.root / TAG
    if not damage.rehash:
        cases.check_same(cases.state_of(victim.engine), victim.saved, but=("norm",))
    victim.engine.load_checkpoint(victim.elsewhere)
    cases.check_same(cases.state_of(victim.engine), victim.other, but=("norm",))
    return False


def play(victim: Victim, count: int, check: Callable[[Victim, Damage], bool], seed: int) -> None:
    refused = dict.fromkeys((damage.name for damage in DAMAGES), 0)
    with bounded():
        for number in range(seed, seed + count):
            rng = random.Random(number)
            damage = DAMAGES[number % len(DAMAGES)]
            differs = victim.lay(damage, rng, spare=check is check_loading)
            began = time.perf_counter()
            try:
                was_refused = check(victim, damage)
                refused[damage.name] += was_refused
                # The manifest's own bytes have no checksum: some of them, such as its times, may be others.
                assert was_refused or not differs or damage.name != "bytes", "loaded other bytes than the checksum says"
            except BaseException as error:
                raise AssertionError(f"case {number}, {damage.name}: {type(error).__name__}: {error}") from error
            assert time.perf_counter() - began < SLOWEST_S, f"case {number}, {damage.name}"
    untouched = ("a file more", "latest")
    assert all(times > 0 for name, times in refused.items() if name not in untouched), refused
    assert refused["latest"] == 0, refused


# -- one check each -----------------------------------------------------------

NO_JSON = [
    b"",
    b"{",
    b"\xff",
    b"[" * 10**6,
    b'{"a":1,"a":1}',
    b"NaN",
    b"[-Infinity]",
    b"1e999",
    b"1" * 5000,
    b"1 1",
    b"\0",
]


@pytest.mark.parametrize("sign", [b"", b"-"])
def test_an_integer_of_many_digits_is_told_by_its_length(sign: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"a": ' + sign + b"9" * 5000 + b"}")
    with pytest.raises(CheckpointError, match=r"\(-?9*\.\.\. is an integer of 5000 digits\)"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("text", NO_JSON, ids=map(str, range(len(NO_JSON))))
def test_no_json(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"x\.json is damaged: it is not JSON"):
        read_json(tmp_path / "x.json")


def test_a_file_with_holes_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "x.json", "wb") as file:
        file.truncate(1 << 40)
    with bounded(), pytest.raises(CheckpointError, match="1099511627776 bytes"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "a\0b", "\ud800", "a" * 256, "ä" * 128])
def test_no_file_name(name: str) -> None:
    assert not is_file_name(name)
    chunk = {"offsets": [0], "sizes": [2], "file": name, "tensor": "x"}
    with pytest.raises(CheckpointError, match="not a valid file name"):
        parsed_metadata({"tensors": {"x": {"dtype": "F32", "shape": [2], "chunks": [chunk]}}}, "here")


def test_no_regular_file(tmp_path: Path) -> None:
    """Also where nobody looked at the folder before."""
    (tmp_path / "x.json").symlink_to("/dev/null")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_json(tmp_path / "x.json")
    Values.of({"x": torch.zeros(3)}).write(tmp_path, STATE)
    (tmp_path / f"{STATE}.safetensors").rename(tmp_path / "elsewhere")
    (tmp_path / f"{STATE}.safetensors").symlink_to("elsewhere")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_values(tmp_path, STATE)


def metadata_of(shape: list[int], boxes: list[tuple[Any, Any]]) -> Any:
    chunks = [{"offsets": [*start], "sizes": [*size], "file": "f", "tensor": "t"} for start, size in boxes]
    return {"tensors": {"x": {"dtype": "F32", "shape": shape, "chunks": chunks}}}


def grid(cuts: list[list[int]]) -> list[tuple[Any, Any]]:
    """Boxes between the cuts of each dimension."""
    runs = [[(start, end - start) for start, end in itertools.pairwise(each)] for each in cuts]
    return [tuple(zip(*box, strict=True)) for box in itertools.product(*runs)]  # pyright: ignore[reportReturnType]


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_chunks_are_the_tensor_exactly_where_each_element_is_there_once(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randrange(1, 7) for _ in range(rng.randrange(1, 4))]
    boxes = grid([sorted({0, size, *(rng.randrange(size) for _ in range(rng.randrange(4)))}) for size in shape])
    rng.shuffle(boxes)
    for _ in range(rng.randrange(3)):  # chunks of the same size elsewhere, so that the number of elements is right
        place = rng.randrange(len(boxes))
        size = boxes[place][1]
        boxes[place] = tuple(rng.randrange(whole - part + 1) for whole, part in zip(shape, size, strict=True)), size
    times = torch.zeros(shape)
    for start, size in boxes:
        times[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += 1
    if bool((times == 1).all()):
        parsed_metadata(metadata_of(shape, boxes), "here")
    else:
        with pytest.raises(CheckpointError, match=r"overlap|begin at the same"):
            parsed_metadata(metadata_of(shape, boxes), "here")


def test_many_chunks_take_no_longer_than_they_are_many() -> None:
    began = time.perf_counter()
    many = grid([[*range(0, 303, 3)]] * 2)
    parsed_metadata(metadata_of([300, 300], many), "here")
    many[7] = ((0, 1), many[7][1])
    with pytest.raises(CheckpointError, match="overlap"):
        parsed_metadata(metadata_of([300, 300], many), "here")
    with pytest.raises(CheckpointError, match="divided in 13 dimensions"):
        parsed_metadata(metadata_of([2] * 13, grid([[0, 1, 2]] * 13)), "here")
    assert time.perf_counter() - began < SLOWEST_S


@pytest.mark.parametrize(
    "value",
    [
        *({"$float": []}, {"$float": "1"}, {"$float32": 0.1}, {"$float16": 1e300}, {"$float32": {"$tuple": []}}),
        *({"$items": [[1, 2], [1, 3]]}, {"$items": [[[], 1]]}, {"$tuple": 5}, {"$x": 1}),
    ],
    ids=str,
)
def test_no_value(value: Any) -> None:
    with pytest.raises(CheckpointError, match="not in this format"):
        decode(value, lambda name: torch.zeros(()), "here")


def test_a_tensor_that_is_named_twice_is_copied_once(tmp_path: Path) -> None:
    values = Values.of({"x": torch.zeros(1000)})
    values.write(tmp_path, STATE)
    assert read_values(tmp_path, STATE)["x"].shape == (1000,)
    (tmp_path / f"{STATE}.json").write_text(json.dumps({"x": [values.content["x"]] * 2}))
    with pytest.raises(CheckpointError, match="names twice"):
        read_values(tmp_path, STATE)


# -- many of them -------------------------------------------------------------


@pytest.mark.medium
def test_reading(victim: Victim) -> None:
    play(victim, 264, check_reading, 0)


@pytest.mark.medium
def test_loading(victim: Victim) -> None:
    play(victim, 36, check_loading, 1_000_000)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, 10))])
def test_reading_more(part: int, victim: Victim) -> None:
    play(victim, 930, check_reading, 2_000_000 + 930 * part)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, 8))])
def test_loading_more(part: int, victim: Victim) -> None:
    play(victim, 88, check_loading, 3_000_000 + 88 * part)


ODD = [
    (f"{STATE}.json", "engine", 5),
    (f"{STATE}.json", "client_state", []),
    (f"{RANK}.json", "random", {}),
    *((f"{STATE}.json", ("engine", key), []) for key in ("run", "global_steps", "loss_scale")),
    (f"{STATE}.json", ("engine", "gradient_accumulation_steps"), 0),
    (f"{STATE}.json", ("engine", "decisive"), {"gradient_clipping": []}),
    (f"{STATE}.json", ("model", "aliases"), {"x": [1]}),
    (f"{STATE}.json", ("model", "left_out"), [{}]),
]


@pytest.mark.parametrize(("name", "key", "value"), ODD)
def test_the_engines_own_values(name: str, key: Any, value: Any, victim: Victim) -> None:
    def apply(rng: random.Random, files: Files) -> None:
        content = json.loads(files[name])
        holder, last = (content, key) if isinstance(key, str) else (content[key[0]], key[1])
        holder[last] = value
        files[name] = dumped(content)

    damage = Damage("values", apply, rehash=True)
    victim.lay(damage, random.Random(0))
    try:
        assert check_loading(victim, damage)
    finally:
        victim.engine.load_checkpoint(victim.elsewhere)
