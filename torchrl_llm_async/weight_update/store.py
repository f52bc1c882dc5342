"""A folder of published weights, one whole file per version.

Owns naming, atomicity and clean-up of publications. It doesn't know where the tensors come from
(:mod:`torchrl_llm_async.weight_update.publisher`), nor whether an engine will accept them.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

__all__ = ["WeightStore"]

_NAME = re.compile(r"version-(\d+)\.safetensors(\.part)?")
_FOLDER = "torchrl-llm-async-"


class WeightStore:
    """Publications as safetensors files, readable from every machine that sees the folder.

    A file is written under a temporary name and renamed, so a reader finds a whole publication
    or none. Put the folder on ``/dev/shm`` for engines on this machine, on a shared file system
    for others. The object can be pickled; it holds no tensors.

    Args:
        root: folder, made if missing; the store's alone.
        keep: newest versions that stay. A trainer publishes up to ``max_staleness + 1`` of them
            before it has to wait for the engines to switch, and an engine that is replaced
            meanwhile loads the one the others serve: give ``max_staleness + 2``.

    Raises:
        ValueError: if ``keep`` < 1.

    Examples:
        >>> import tempfile
        >>> store = WeightStore(Path(tempfile.mkdtemp()) / "weights")
        >>> store.write(3, [("model.norm.weight", torch.ones(8))]).name
        'version-00000003.safetensors'
        >>> store.latest()
        3
        >>> store.close()
    """

    def __init__(self, root: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: give at least 1")
        self.root = Path(root)
        self.keep = keep
        self.root.mkdir(parents=True, exist_ok=True)

    @classmethod
    def temporary(cls, parent: str | Path | None = None, *, keep: int = 2) -> WeightStore:
        """A store in a new folder named after this process.

        Folders that processes of this machine left behind when they were killed are removed.

        Args:
            parent: where to make it; by default ``/dev/shm``, or where that does not exist the
                folder for temporary files.
            keep: as for the class.
        """
        if parent is None:
            parent = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
        own = f"{_FOLDER}{socket.gethostname()}-"
        for folder in Path(parent).glob(f"{own}*"):
            owner = folder.name.removeprefix(own).split("-")[0]
            if owner.isdigit() and not _is_alive(int(owner)):
                shutil.rmtree(folder, ignore_errors=True)  # Another run may sweep it as well.
        return cls(tempfile.mkdtemp(prefix=f"{own}{os.getpid()}-", dir=parent), keep=keep)

    def write(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
        """Publishes a set of weights.

        Args:
            version: version they stand for, >= 0; it is stamped into the file too.
            named_tensors: Hugging Face names and CPU tensors, any floating dtype.

        Returns:
            The file, whole.

        Raises:
            ValueError: if ``version`` is negative or there are no tensors.
            OSError: if the folder is full or gone; nothing is published then.
        """
        if version < 0:
            raise ValueError(f"version={version}: give 0 or more")
        tensors = {name: tensor.detach().contiguous() for name, tensor in named_tensors}
        if not tensors:
            raise ValueError(f"version {version} has no tensors: give the model's whole set")
        final = self._file(version)
        part = final.with_name(final.name + ".part")
        try:
            save_file(tensors, part, metadata={"version": str(version), "format": "pt"})
            os.replace(part, final)
        except SafetensorError as error:
            raise OSError(
                f"version {version} can't be written to {self.root} ({error}); is the folder "
                "still there, and has it room?"
            ) from error
        finally:
            part.unlink(missing_ok=True)
        for old in self._versions()[: -self.keep]:
            self._file(old).unlink()
        return final

    def path(self, version: int) -> Path:
        """The file of a version.

        Raises:
            FileNotFoundError: if it was never published, or is no longer kept.
        """
        file = self._file(version)
        if not file.exists():
            raise FileNotFoundError(
                f"version {version} is not in {self.root}, which holds {self._versions()}"
            )
        return file

    def latest(self) -> int | None:
        """The newest version, or None before the first."""
        return max(self._versions(), default=None)

    def close(self) -> None:
        """Removes the publications, and the folder unless others put something into it."""
        if not self.root.exists():
            return
        for file in self.root.iterdir():
            if _NAME.fullmatch(file.name):
                file.unlink()
        if not any(self.root.iterdir()):
            self.root.rmdir()

    def _file(self, version: int) -> Path:
        return self.root / f"version-{version:08d}.safetensors"

    def _versions(self) -> list[int]:
        names = (_NAME.fullmatch(file.name) for file in self.root.iterdir())
        return sorted(int(name[1]) for name in names if name and not name[2])


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # It lives, and is somebody else's.
        pass
    return True
