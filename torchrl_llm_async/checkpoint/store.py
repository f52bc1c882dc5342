"""A folder of checkpoints, each whole or not there, whenever the machine stops.

Owns names, order, durability and what makes a checkpoint good: a manifest with the size and digest
of every file. What the files hold is their writers' affair.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from torchrl._utils import logger as torchrl_logger

_FORMAT = 2
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step_\d+(-\d+)?")


class CheckpointStore:
    """The last few checkpoints of a run.

    A checkpoint is written into the folder that :meth:`begin` gives, and becomes one by
    :meth:`commit`: files synced, manifest added, folder renamed. Until then, and if it never comes
    to that, the ones before are as they were. What was committed last counts as the newest, also if
    a later version is there: a run that was resumed further back has made that obsolete.

    Args:
        root: folder, made if missing. One process writes into it at a time. What has other names
            than the store's is let alone.
        keep: good checkpoints that stay; damaged ones go when so many newer ones are there.

    Raises:
        ValueError: ``keep`` < 1.

    Examples:
        >>> import tempfile
        >>> store = CheckpointStore(Path(tempfile.mkdtemp()))
        >>> folder = store.begin(10)
        >>> _ = (folder / "state.json").write_text("{}")
        >>> store.commit(10).name, store.newest().name
        ('step_00010', 'step_00010')
    """

    def __init__(self, root: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1")
        self.root = Path(root)
        self.keep = keep
        self._good: dict[Path, bool] = {}  # what was found when it was last looked at

    def begin(self, version: int) -> Path:
        """An empty folder to write the checkpoint of ``version`` into."""
        if not self.root.exists():
            self.root.mkdir(parents=True)
            _sync(self.root.parent)
        for suffix in (".part", ".old"):  # of a process that was killed
            for left_over in self._folders(suffix):
                shutil.rmtree(left_over)
        folder = self._part(version)
        folder.mkdir()
        return folder

    def commit(self, version: int) -> Path:
        """Makes what was written since :meth:`begin` a checkpoint, and removes those now too many.

        Of earlier ones whose state this store has not looked at before, as they are of another
        process, the newest are read for it.

        Raises:
            OSError: the disk is full or gone; the checkpoints before are as they were.
        """
        part = self._part(version)
        files = sorted(path for path in part.rglob("*") if path.is_file())
        manifest = {
            "format": _FORMAT,
            "version": version,
            "commit": self._next_commit(),
            "files": {str(file.relative_to(part)): _fingerprint(file) for file in files},
        }
        _write_manifest(part, manifest)
        folders = [path for path in part.rglob("*") if path.is_dir()]
        for path in (*files, part / _MANIFEST, *folders, part):
            _sync(path)
        # The name may be taken, by a run that was resumed before it came here again.
        final, again = self.root / f"step_{version:05d}", 1
        while final.exists():
            again += 1
            final = self.root / f"step_{version:05d}-{again}"
        part.rename(final)
        _sync(self.root)
        self._good[final] = True
        self._prune()
        return final

    def make_newest(self, folder: Path) -> None:
        """For a run that goes on from this checkpoint: it comes back to it, not to a later one.

        Raises:
            ValueError: it is none of the store's.
        """
        if folder not in self._folders():
            raise ValueError(f"{folder} is none of the checkpoints in {self.root}")
        manifest = _read_manifest(folder)
        if manifest["commit"] + 1 < self._next_commit():
            _write_manifest(folder, manifest | {"commit": self._next_commit()})

    def _next_commit(self) -> int:
        return max((number for number, _ in self._committed()), default=0) + 1

    def _prune(self) -> None:
        good = 0
        for _, folder in sorted(self._committed(), reverse=True):
            if good == self.keep:
                shutil.rmtree(folder.rename(folder.with_name(folder.name + ".old")))
                self._good.pop(folder, None)
            elif self._good.get(folder, False) or (folder not in self._good and self._try(folder)):
                good += 1

    def newest(self) -> Path | None:
        """The newest checkpoint that is good, or None; those passed over are logged."""
        folders = (folder for _, folder in sorted(self._committed(), reverse=True))
        return next(filter(self._try, folders), None)

    def _try(self, folder: Path) -> bool:
        """Whether it is a good checkpoint."""
        try:
            self.verified(folder)
        except ValueError as error:
            torchrl_logger.warning(f"{error}; looking for an earlier one")
            self._good[folder] = False
        else:
            self._good[folder] = True
        return self._good[folder]

    @staticmethod
    def verified(folder: Path) -> Path:
        """The folder, if it is a good checkpoint.

        Raises:
            ValueError: it is none, and why.
        """
        manifest = _read_manifest(folder)
        if manifest is None or not manifest["files"]:
            raise ValueError(f"{folder} is no checkpoint: it has no readable {_MANIFEST}")
        if manifest["format"] != _FORMAT:
            raise ValueError(
                f"{folder} has format {manifest['format']}, this program reads {_FORMAT}; resume "
                "with the version of torchrl-llm-async that wrote it"
            )
        for name, expected in manifest["files"].items():
            file = folder / name
            if not file.is_file():
                raise ValueError(f"{folder} is damaged: {name} is missing")
            try:
                found = _fingerprint(file)
            except OSError as error:  # A bad sector is damage like any other.
                raise ValueError(f"{folder} is damaged: {name} can't be read ({error})") from error
            if found != expected:
                raise ValueError(f"{folder} is damaged: {name} differs from what was written")
        return folder

    def _part(self, version: int) -> Path:
        return self.root / f"step_{version:05d}.part"

    def _committed(self) -> list[tuple[int, Path]]:
        """Order of commitment and folder of all that look like checkpoints; 0 if it is unknown."""
        folders = self._folders()
        manifests = [_read_manifest(folder) for folder in folders]
        return [
            (0 if manifest is None else manifest["commit"], folder)
            for folder, manifest in zip(folders, manifests, strict=True)
        ]

    def _folders(self, suffix: str = "") -> list[Path]:
        """Those the store has made, with this behind their names."""
        return [
            path
            for path in self.root.glob(f"step_*{suffix}")
            if _NAME.fullmatch(path.name.removesuffix(suffix)) and path.is_dir()
        ]


def _write_manifest(folder: Path, manifest: dict) -> None:
    """Durably, and never half: the new one, or the one before."""
    new = folder / f"{_MANIFEST}.new"
    new.write_text(json.dumps(manifest, indent=1))
    _sync(new)
    new.replace(folder / _MANIFEST)
    _sync(folder)


def _read_manifest(folder: Path) -> dict | None:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    is_whole = (
        isinstance(manifest, dict)
        and "format" in manifest
        and isinstance(manifest.get("commit"), int)
        and isinstance(manifest.get("files"), dict)
    )
    return manifest if is_whole else None


def _fingerprint(file: Path) -> dict[str, int | str]:
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "blake2b")
    return {"bytes": file.stat().st_size, "blake2b": digest.hexdigest()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
