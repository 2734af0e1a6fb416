"""What is read, in which order, and what is not text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from longshore.cli.data import read_text
from longshore.cli.terminal import CommandError


def test_files_and_folders_in_a_fixed_order(tmp_path):
    for name in ("b/2.txt", "b/10.txt", "b/c/x", "a.txt", "b/.hidden", "b/.git/config"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "b" / "empty").touch()
    text = read_text((tmp_path / "b", tmp_path / "a.txt"), None)
    assert text.documents == [b"b/10.txt", b"b/2.txt", b"b/c/x", b"a.txt"]
    assert text.skipped == 0


def test_folders_leave_out_what_is_not_text(tmp_path):
    (tmp_path / "picture").write_bytes(b"\x89PNG\0")
    (tmp_path / "latin1").write_bytes("Käse".encode("latin-1"))
    (tmp_path / "text").write_text("Käse")
    text = read_text((tmp_path,), None)
    assert text.documents == ["Käse".encode()]
    assert text.skipped == 2


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"a\0b", "it has NUL bytes"),
        (b"a\xe4b", "byte 0xe4 is not UTF-8"),
        (b"ab\xc3", "it ends within a character"),
        (b"a" * (1 << 20) + b"\xff", "byte 0xff is not UTF-8"),
    ],
)
def test_a_named_file_must_be_text(tmp_path, content, reason):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(CommandError, match=reason):
        read_text((path,), None)


def test_characters_across_chunks(tmp_path):
    content = b"a" * ((1 << 20) - 1) + "ä€".encode()
    (tmp_path / "file").write_bytes(content)
    assert read_text((tmp_path,), None).documents == [content]


@pytest.mark.parametrize("limit, expected", [(3, ["aä"]), (2, ["a"]), (5, ["aäb", "c"]), (100, ["aäb", "cd"])])
def test_max_bytes_ends_at_a_character(tmp_path, limit, expected):
    (tmp_path / "1").write_text("aäb")
    (tmp_path / "2").write_text("cd")
    assert read_text((tmp_path,), limit).documents == [text.encode() for text in expected]


def test_max_bytes_reads_no_further(tmp_path):
    """The part that is cut off may be anything."""
    (tmp_path / "file").write_bytes(b"text" + b"\0" * 100)
    assert read_text((tmp_path / "file",), 4).documents == [b"text"]


def test_the_standard_library_is_the_default():
    text = read_text((), 3_000_000)
    assert sum(map(len, text.documents)) == 3_000_000
    first = Path(os.__file__).with_name("__future__.py").read_bytes()
    assert text.documents[0] == first
    assert read_text((), 3_000_000) == text


def test_nothing_to_read(tmp_path):
    with pytest.raises(CommandError, match="there is no text in"):
        read_text((tmp_path,), None)


def test_missing(tmp_path, cli):
    assert "cannot read --data /nowhere/x: No such file or directory" in cli("train", "--data", "/nowhere/x").refused()


def test_neither_file_nor_folder():
    with pytest.raises(CommandError, match="neither a file nor a folder"):
        read_text((Path("/dev/null"),), None)


@pytest.mark.parametrize("folder", [False, True])
def test_unreadable(tmp_path, monkeypatch, folder):
    """As root everything is readable, so the refusal of the system is put in by hand."""
    path = tmp_path / "file"
    path.write_text("text")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    if folder:
        monkeypatch.setattr("os.scandir", refuse)
    else:
        monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CommandError, match=r"cannot read .*: Permission denied"):
        read_text((tmp_path,), None)
