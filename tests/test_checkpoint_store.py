"""Whenever the writer is killed, the newest checkpoint is a whole one."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import shutil
from pathlib import Path

import pytest
from full_disk import full_disk

from torchrl_llm_async.checkpoint import CheckpointStore


def write_for_ever(root: Path, begun) -> None:
    """Goes on where the newest checkpoint stands, and tells of each that it begins."""
    store = CheckpointStore(root)
    newest = store.newest()
    version = 0 if newest is None else int((newest / "a").read_text())
    while True:
        version += 1
        folder = store.begin(version)
        begun.send(version)
        for name in "abc":
            (folder / name).write_text(str(version))
        (folder / "sub").mkdir()
        (folder / "sub" / "d").write_bytes(bytes([version % 256]) * 200_000)
        store.commit(version)


def write(store: CheckpointStore, version: int, text: str = "x") -> Path:
    folder = store.begin(version)
    (folder / "a").write_text(text)
    (folder / "b").mkdir()
    (folder / "b" / "c").write_bytes(bytes(1000))
    return store.commit(version)


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir())


def test_a_killed_writer_leaves_a_whole_one(tmp_path: Path) -> None:
    rng = random.Random(0)
    reached = 0
    context = multiprocessing.get_context("fork")  # the others take seconds to import torch
    for _ in range(40):
        ours, theirs = context.Pipe()
        writer = context.Process(target=write_for_ever, args=(tmp_path, theirs))
        writer.start()
        for _ in range(rng.randint(2, 5)):
            begun = ours.recv()
        writer.join(rng.uniform(0, 0.02))  # It doesn't end by itself: somewhere in its work.
        writer.kill()
        writer.join()
        newest = CheckpointStore(tmp_path).newest()
        version = int((newest / "a").read_text())
        assert version >= max(reached, begun - 1)
        assert [(newest / name).read_text() for name in "abc"] == [str(version)] * 3
        assert (newest / "sub" / "d").read_bytes() == bytes([version % 256]) * 200_000
        reached = version
    assert reached > 40


def test_the_last_few_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.newest() is None
    for version in (10, 20, 30):
        write(store, version)
    assert names(store) == ["step_00020", "step_00030"]
    assert store.newest().name == "step_00030"


def test_what_a_run_resumed_further_back_writes_is_newer(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 20, "first")
    write(store, 30, "first")
    again = write(store, 20, "again")
    assert store.newest() == again
    assert (again / "a").read_text() == "again"
    assert names(store) == ["step_00020-2", "step_00030"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "a").unlink(), "a is missing"),
        (lambda folder: (folder / "a").write_text(""), "a differs"),
        (lambda folder: flip(folder / "b" / "c"), "b/c differs"),
        (lambda folder: (folder / "manifest.json").unlink(), "no readable manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "no readable manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "no readable manifest.json"),
        (
            lambda folder: (folder / "manifest.json").write_text(
                '{"format": 2, "commit": "2", "files": {}}'
            ),
            "no readable manifest.json",
        ),
    ],
)
def test_a_damaged_one_is_passed_over(damage, message: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    good = write(store, 10)
    bad = write(store, 20)
    damage(bad)
    with pytest.raises(ValueError, match=message):
        CheckpointStore.verified(bad)
    assert store.newest() == good


@pytest.mark.parametrize("found_by", ["newest", "another process"])
def test_a_damaged_one_crowds_out_no_good_one(found_by: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 10)
    flip(write(store, 20) / "b" / "c")
    if found_by == "newest":
        assert store.newest().name == "step_00010"
    else:
        store = CheckpointStore(tmp_path, keep=2)
    write(store, 30)
    assert names(store) == ["step_00010", "step_00020", "step_00030"]
    assert store.newest().name == "step_00030"
    flip(tmp_path / "step_00030" / "b" / "c")
    assert store.newest().name == "step_00010"
    write(store, 40)
    assert names(store) == ["step_00010", "step_00020", "step_00030", "step_00040"]
    write(store, 50)  # Two good ones are newer than the damaged ones.
    assert names(store) == ["step_00040", "step_00050"]


def test_what_it_has_seen_to_be_good_it_does_not_read_again(tmp_path: Path, monkeypatch) -> None:
    for version in (10, 20):
        write(CheckpointStore(tmp_path, keep=3), version)
    store, read = CheckpointStore(tmp_path, keep=3), []
    digest = hashlib.file_digest

    def note(stream, name: str):
        read.append(Path(stream.name).relative_to(tmp_path).parts[0])
        return digest(stream, name)

    monkeypatch.setattr("hashlib.file_digest", note)
    write(store, 30)
    assert {"step_00010", "step_00020"} < set(read)
    read.clear()
    write(store, 40)
    assert set(read) == {"step_00040.part"}


def test_any_flipped_bit_leaves_a_good_one(tmp_path: Path) -> None:
    """Also in a manifest, where it can change no more than which of the good ones is taken."""
    store = CheckpointStore(tmp_path, keep=2)
    good, other = write(store, 10), write(store, 20)
    for file in (path for path in other.rglob("*") if path.is_file()):
        data = file.read_bytes()
        for bit in range(0, 8 * len(data), 11):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            newest = store.newest()
            assert newest == good or (file.name == "manifest.json" and newest == other)
        file.write_bytes(data)
    assert store.newest() == other


def test_one_that_cannot_be_read_is_passed_over(tmp_path: Path, monkeypatch) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    good, bad = write(store, 10), write(store, 20)
    digest = hashlib.file_digest

    def bad_sector(stream, name: str):
        if Path(stream.name) == bad / "b" / "c":
            raise OSError(5, "Input/output error")
        return digest(stream, name)

    monkeypatch.setattr("hashlib.file_digest", bad_sector)
    with pytest.raises(ValueError, match="b/c can't be read"):
        CheckpointStore.verified(bad)
    assert store.newest() == good


def test_every_file_and_folder_is_synced_before_it_counts(tmp_path: Path, monkeypatch) -> None:
    synced: set[Path] = set()
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr("os.fsync", note)
    store = CheckpointStore(tmp_path / "new")
    folder = store.begin(1)
    (folder / "only" / "folders").mkdir(parents=True)
    (folder / "only" / "folders" / "file").write_text("x")
    rename = Path.rename

    def renamed(source: Path, target: Path) -> Path:
        assert {folder, *folder.rglob("*")} <= synced
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", renamed)
    store.commit(1)
    assert {tmp_path, tmp_path / "new"} <= synced


def test_one_of_another_format_says_so(tmp_path: Path) -> None:
    folder = write(CheckpointStore(tmp_path), 1)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 9'))
    with pytest.raises(ValueError, match="has format 9, this program reads 2"):
        CheckpointStore.verified(folder)


def test_an_error_while_committing_leaves_the_one_before(tmp_path: Path, monkeypatch) -> None:
    store = CheckpointStore(tmp_path)
    good = write(store, 10)

    def full(*args) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write(store, 20)
    assert store.newest() == good
    write(store, 20)
    assert store.newest().name == "step_00020"


def test_a_full_disk_leaves_the_one_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    good = write(store, 10)
    store.begin(20)
    with full_disk(100), pytest.raises(OSError, match="too large"):
        write(store, 20)
    with full_disk(1_000), pytest.raises(OSError, match="too large"):
        folder = store.begin(20)
        for index in range(20):  # The manifest alone is too long.
            (folder / f"file-{index}").write_text("x")
        store.commit(20)
    assert store.newest() == good
    write(store, 20)
    assert names(store) == ["step_00010", "step_00020"]


def test_keep_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointStore(tmp_path, keep=0)


def test_what_others_put_there_is_let_alone(tmp_path: Path) -> None:
    """Neither counted, nor removed, nor in the way."""
    store = CheckpointStore(tmp_path, keep=1)
    (tmp_path / "step_00002.tar.gz").write_text("a backup")
    (tmp_path / "step_00099.old").write_text("no folder")
    (tmp_path / "notes").mkdir()
    copy = shutil.copytree(write(store, 1), tmp_path / "step_00001.bak")
    for version in (2, 3):
        write(store, version)
    assert names(store) == [
        *("notes", "step_00001.bak", "step_00002.tar.gz", "step_00003", "step_00099.old")
    ]
    assert store.newest() == tmp_path / "step_00003"
    assert CheckpointStore.verified(copy) == copy  # to be gone on from by its name


def test_a_run_comes_back_to_where_it_went_on_from(tmp_path: Path) -> None:
    """Also if it is killed before its next checkpoint; and the later one is still there."""
    store = CheckpointStore(tmp_path)
    earlier, later = write(store, 4), write(store, 6)
    store.make_newest(earlier)
    assert CheckpointStore(tmp_path).newest() == earlier
    assert CheckpointStore.verified(later) == later
    manifest = (earlier / "manifest.json").read_text()
    store.make_newest(earlier)
    assert (earlier / "manifest.json").read_text() == manifest
    assert write(store, 5) == store.newest()
    assert names(store) == ["step_00004", "step_00005"]
    with pytest.raises(ValueError, match="is none of the checkpoints in"):
        store.make_newest(tmp_path / "elsewhere")


def test_an_empty_one_is_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.begin(1)
    with pytest.raises(ValueError, match="is no checkpoint"):
        CheckpointStore.verified(store.commit(1))
