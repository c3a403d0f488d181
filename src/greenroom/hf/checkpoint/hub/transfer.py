"""Downloads of large files into the hub's cache: in parts, resumed, and checked by SHA-256.

huggingface_hub deletes what it has of a file when a download ends early. Models have files of tens
of gigabytes, so these are downloaded here: range requests run in parallel, their bytes are appended
in order to `blobs/SHA256.incomplete` and hashed on the way, and a later download goes on at the end
of that file. A file takes its final name when its checksum is right, never before.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import (
    WeakFileLock,
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)

from greenroom.config import show_bytes
from greenroom.errors import CheckpointError, GreenroomError, NotAModel
from greenroom.hf.checkpoint.hub.errors import RESUMED
from greenroom.hf.checkpoint.hub.repository import HubFile, Repository

PART_BYTES = 16 << 20  # of one request; they are in memory until they are appended
CONNECTIONS = 6
PIECE_BYTES = 1 << 18
ATTEMPTS = 6  # requests for one part without a single new byte
PAUSE_S = 1.0  # before the second attempt; doubled for each further one
LOCK_S = 2.0  # wait for another process that downloads the same file
RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class DownloadProgress:
    """Progress of a download in bytes.

    The class attribute `show` is called with (bytes done, bytes in total), by one thread at a time.
    """

    show: Callable[[float, float], object] = staticmethod(lambda done, total: None)

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count further bytes that have arrived."""
        with self._lock:
            self.done += nbytes
            DownloadProgress.show(self.done, self.total)


class _Stopped(Exception):
    """Internal: the download ended early, so nobody waits for this part."""


class Transfer:
    """Download of a repository's large files to blobs of the hub's cache.

    model: the name that the user gave, for messages
    """

    def __init__(self, model: str, repository: Repository, progress: DownloadProgress) -> None:
        self._model, self._repository, self._progress = model, repository, progress
        self._headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        self._stop, self._beginning = threading.Event(), b""
        self._pool = ThreadPoolExecutor(CONNECTIONS, "hub-download")

    def run(self, files: Sequence[HubFile]) -> None:
        """Download files one after the other, several parts of each at a time.

        What has arrived stays in the cache if the download ends early. Raises NotAModel if the hub
        fails, CheckpointError for a wrong length or checksum, OSError of the local disk.
        """
        try:
            for file in files:
                self._lock_and_download(file)
        finally:
            self._stop.set()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _lock_and_download(self, file: HubFile) -> None:
        blob = blob_path(self._repository.folder, file)
        lock = Path(constants.HF_HUB_CACHE) / ".locks" / blob.parents[1].name / f"{blob.name}.lock"
        for path in (blob, lock):
            path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(WeakFileLock(lock, timeout=LOCK_S))
            except TimeoutError as error:
                raise NotAModel(
                    f"{self._model}: another process is downloading {file.path}: run this command"
                    " again when that one has finished"
                ) from error
            if blob.exists():  # downloaded by that process, or part of another revision
                self._progress.add(file.nbytes)
            else:
                self._download(file, blob)

    def _download(self, file: HubFile, blob: Path) -> None:
        """Download a file that the cache lacks; go on where an earlier download stopped."""
        partial = partial_path(blob)
        with open(partial, "r+b" if partial.exists() else "x+b") as stream:
            digest = hashlib.sha256()
            for piece in _pieces(stream, file.nbytes):  # from an earlier download
                digest.update(piece)
                self._progress.add(len(piece))
            stream.truncate()
            begin = stream.tell()
            try:
                for part in self._parts(file, begin):
                    stream.write(part)
                    digest.update(part)
            finally:
                stream.write(self._beginning)  # of the part that is not complete
            stream.flush()
            os.fsync(stream.fileno())
        if digest.hexdigest() != file.sha256:
            partial.unlink()
            earlier = f" ({show_bytes(begin)} of it in an earlier download)" * bool(begin)
            raise CheckpointError(
                f"{self._model}: {file.path} arrived{earlier} with another checksum than the hub"
                f" names ({digest.hexdigest()[:12]}, not {str(file.sha256)[:12]}), and was deleted:"
                " download it again"
            )
        os.replace(partial, blob)

    def _parts(self, file: HubFile, begin: int) -> Iterator[bytes]:
        """Yield the parts of a file in order; later parts are requested meanwhile."""
        url = hf_hub_url(self._repository.name.repository, file.path,
                         revision=self._repository.commit)  # fmt: skip
        waiting: deque[tuple[bytearray, Future[None]]] = deque()
        for at in range(begin, file.nbytes, PART_BYTES):
            part, end = bytearray(), min(at + PART_BYTES, file.nbytes)
            waiting.append((part, self._pool.submit(self._part, file, url, at, end, part)))
            if len(waiting) == CONNECTIONS:
                yield self._wait(*waiting.popleft())
        while waiting:
            yield self._wait(*waiting.popleft())

    def _wait(self, part: bytearray, future: Future[None]) -> bytes:
        """Return a part when it is complete; keep its beginning if it never will be."""
        try:
            future.result()
        except BaseException:  # Ctrl-C too
            self._stop.set()
            self._beginning = bytes(part)
            raise
        return bytes(part)

    def _part(self, file: HubFile, url: str, begin: int, end: int, part: bytearray) -> None:
        """Request the bytes [begin, end) of a file, again if the connection breaks off."""
        attempts = 0
        while True:
            before = len(part)
            try:
                self._request(file, url, begin, end, part)
                return
            except (GreenroomError, _Stopped):
                raise
            except HfHubHTTPError as error:
                if getattr(error.response, "status_code", 0) < 500:
                    raise
                reason = str(error.response.status_code)
            except Exception as error:  # of the transport, whose library changes
                reason = type(error).__name__
            attempts = 1 if len(part) > before else attempts + 1
            if attempts == ATTEMPTS or self._stop.wait(PAUSE_S * 2 ** (attempts - 1)):
                raise NotAModel(
                    f"{self._model}: the download of {file.path} broke off ({reason}) after"
                    f" {show_bytes(begin + len(part))} of {show_bytes(file.nbytes)}; {RESUMED}"
                )

    def _request(self, file: HubFile, url: str, begin: int, end: int, part: bytearray) -> None:
        """Append the bytes to `part` that it lacks of [begin, end), as far as they arrive."""
        start = begin + len(part)
        headers = {**self._headers, "Range": f"bytes={start}-{end - 1}"}
        with http_stream_backoff(
            "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            retry_on_exceptions=(), retry_on_status_codes=(429,),
        ) as response:  # fmt: skip
            hf_raise_for_status(response)
            self._check_range(file, response, start, end)
            for piece in response.iter_bytes():
                if self._stop.is_set():
                    raise _Stopped
                if len(part) + len(piece) > end - begin:
                    raise self._wrong_length(file, "more bytes")
                part += piece
                self._progress.add(len(piece))
        if len(part) < end - begin:
            raise ConnectionError("the answer was too short")

    def _check_range(self, file: HubFile, response: Any, start: int, end: int) -> None:
        """Check that an answer has the requested bytes, of a file of the expected length."""
        match = RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if response.status_code == 206 and match is not None:
            first, last, total = map(int, match.groups())
            if total != file.nbytes:
                raise self._wrong_length(file, show_bytes(total))
            if (first, last + 1) == (start, end):
                return
        elif (start, end) == (0, file.nbytes):
            return  # a server without ranges, but this is the whole file
        raise NotAModel(
            f"{self._model}: {constants.ENDPOINT} does not send parts of files, which downloads of"
            " large models need: use another HF_ENDPOINT"
        )

    def _wrong_length(self, file: HubFile, length: str) -> CheckpointError:
        return CheckpointError(
            f"{self._model}: {constants.ENDPOINT} sends {length} of {file.path}, but names its"
            f" length as {show_bytes(file.nbytes)}: try again later"
        )


def blob_path(folder: Path, file: HubFile) -> Path:
    """Return where the cache has the content of a large file: by its SHA-256."""
    return folder / "blobs" / str(file.sha256)


def partial_path(blob: Path) -> Path:
    """Return the path of what has arrived of an unfinished download."""
    return blob.with_name(f"{blob.name}.incomplete")


def _pieces(stream: BinaryIO, most: int) -> Iterator[bytes]:
    """Yield the first bytes of a file, at most `most`, from where the stream stands."""
    while most and (piece := stream.read(min(most, PIECE_BYTES))):
        most -= len(piece)
        yield piece
