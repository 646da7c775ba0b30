"""`CertificateFolder`: the certificate files of a run. None that is there already is written over or trusted."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from patchguard import verify
from patchguard.data.decode import Unreadable
from patchguard.errors import InputError
from patchguard.guard import Plan, Task
from patchguard.runs.job import Job
from patchguard.runs.records import Folder
from patchguard.storage import atomic
from patchguard.storage.certificate_file import image_digest

GO_ELSEWHERE = "Give another --certificates, or move that file away."


LONGEST = 80  # letters of an image's name in that of its certificate


def name_certificate(index: int, name: str, key: str) -> str:
    """Return the name of the certificate file of one image and patch.

    >>> name_certificate(7, "cats/tom 1.jpg", "2%")
    '000007-cats-tom-1-2percent.pgc'
    """
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name.rpartition(".")[0] or name)[-LONGEST:].strip("-.")
    return "-".join(filter(None, [f"{index:06d}", plain, key.replace("%", "percent")])) + ".pgc"


def find_name(index: int, key: str, entry: Mapping[str, Any]) -> str:
    """Return the name of the file that a record is about; older releases left the image's name out and do not say."""
    return str(entry.get("file") or name_certificate(index, "", key))


@final
@dataclass(frozen=True)
class CertificateFolder:
    """A folder with a file per image and patch; a record holds the SHA-256 of each of its files."""

    path: Path

    def write(self, name: str, content: bytes) -> str:
        """Write a file unless it is there, and return its digest; refuse where other content is there."""
        there = self._read(name)
        if there is None:
            atomic.write_bytes(self.path / name, content, durable=False)
        elif there != content:
            raise InputError(
                f"{self.path / name} is there already with other content: another release, device or batch size gives "
                f"other evidence. {GO_ELSEWHERE}"
            )
        return hashlib.sha256(content).hexdigest()

    def check(self, run: Folder, job: Job) -> None:
        """Raise unless each file is the one that a record names or one that this run may come to write."""
        recorded: dict[int, Mapping[str, Any]] = {
            record["index"]: record["patches"] for record in run.records() if "error" not in record
        }
        for index, entries in recorded.items():
            for key, entry in entries.items():
                self._check_recorded(run, find_name(index, key, entry), entry)
        plans: dict[tuple[int, int], Plan] = {}
        digests: dict[tuple[tuple[int, int], str], str] = {}
        for index, key in self._others(job, recorded):
            name = name_certificate(index, job.source.names[index], key)
            try:
                image = job.source.read(index)
                size = (image.shape[1], image.shape[2])
                plan = plans[size] = plans.get(size) or job.plan(size)
                task = plan.tasks[[patch.key for patch in job.patches].index(key)]
                model = digests[size, key] = digests.get((size, key)) or task.guard.digest
                same = self._is_about(name, task, model, image_digest(image))
            except (Unreadable, InputError):  # this run will write no file for it
                same = False
            if not same:
                raise InputError(
                    f"{self.path / name} is there already and is about another image, model or patch. {GO_ELSEWHERE}"
                )

    def _check_recorded(self, run: Folder, name: str, entry: Mapping[str, Any]) -> None:
        content = self._read(name)
        if content is None:
            raise InputError(
                f"{self.path} lacks {name}, which {run.path} has recorded. Give the folder that its certificates are "
                "in, or another --out to certify again."
            )
        if "certificate" not in entry:
            raise InputError(
                f"{run.path} is of an older release and does not say what {name} must hold. "
                "Give another --out and another --certificates to certify again."
            )
        if hashlib.sha256(content).hexdigest() != entry["certificate"]:
            raise InputError(
                f"{self.path / name} is not the file that {run.path} has written. Bring that one back, or give another "
                "--out and another --certificates to certify again."
            )

    def _others(self, job: Job, recorded: Mapping[int, object]) -> Iterator[tuple[int, str]]:
        """Yield index and patch of the files that are there under a name that this run may still write."""
        keys = [patch.key for patch in job.patches]
        there = {path.name for path in self.path.glob("*.pgc")}
        for index in range(len(job.source)) if there else ():
            if index not in recorded:
                name = job.source.names[index]
                yield from ((index, key) for key in keys if name_certificate(index, name, key) in there)

    def _is_about(self, name: str, task: Task, model: str, image: str) -> bool:
        try:
            claim = verify.read(verify.load(self.path / name))[0]
        except verify.Refused:
            return False
        digests, patch = claim["digests"], {"height": task.patch.height, "width": task.patch.width, "count": 1}
        return bool(digests["model"] == model and digests["image"] == image and claim["patch"] == patch)

    def _read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"{self.path / name} cannot be read: {error.strerror}. {GO_ELSEWHERE}") from None
