"""Per-problem records: appended as answers come, resumed after a kill, keyed by everything that changes them.

One JSONL file per (model, task) holds *cells*, one per KV configuration. Three kinds of line:

    {"kind": "cell",   "key": <sha256 of identity>, "identity": {...}, "provenance": {...}, "check": ...}
    {"kind": "answer", "cell": <key[:16]>, "index": 0, "problem": "...", "response": "...", "tokens": 57,
     "finished": true, "correct": true | false | null, "check": ...}
    {"kind": "score",  "cell": <key[:16]>, "problem": "...", "correct": true, "check": ...}

``identity`` is what the answers depend on (weights, KV configuration, problems, decoding, seed, n, scorers, code of
the method, device class, schema); ``provenance`` (who ran it, when, on what) lies beside the key, not in it.
Answers are appended the moment they exist, scores in batches: a killed run loses neither. ``check`` is a checksum of
its own line, so a half-written or edited line is found, reported and computed again, and spoils nothing else.
A finished file is sorted, with the scores merged in, and compressed: ``<name>.jsonl`` while a run appends to it,
``<name>.jsonl.xz`` afterwards. Here a file is always named by its plain name; where both exist (a run was killed, or
goes on) the plain one counts. Running again changes no byte: the content is compared, not how it was compressed.

The trade-off: a compressed file is a tenth to a twentieth of its text, small enough to commit, but is expanded to be
read (``xzcat``) or compared by hand, and damage to it costs every answer behind the damaged place, not one line.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import lzma
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from residualquant.errors import ResidualQuantError
from residualquant.repro.paths import show, write_atomic

SCHEMA = 2
FINISHED = ".xz"
_START = b'{"c'  # of every line, keys being sorted


@dataclass(frozen=True)
class Answer:
    """One response. ``index`` is the problem's place in its task; ``correct`` is None until it was scored."""

    problem: str
    index: int
    response: str
    tokens: int
    finished: bool
    correct: bool | None = None


@dataclass
class Cell:
    """The answers of one (model, task, KV configuration), keyed by ``identity``."""

    identity: dict
    provenance: dict
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return key_of(self.identity)

    @property
    def is_complete(self) -> bool:
        """Whether every one of the ``n`` problems is answered and scored."""
        return len(self.answers) == self.identity["n"] and all(a.correct is not None for a in self.answers.values())

    @property
    def correct(self) -> dict[str, bool]:
        """{problem id: correct} of the scored answers."""
        return {a.problem: a.correct for a in self.answers.values() if a.correct is not None}


def key_of(identity: Mapping) -> str:
    """sha256 of the canonical JSON of ``identity``."""
    return hashlib.sha256(_canonical(identity).encode()).hexdigest()


def _canonical(value) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _seal(line: dict) -> bytes:
    check = hashlib.sha256(_canonical(line).encode()).hexdigest()[:12]
    return (_canonical(line | {"check": check}) + "\n").encode()


def _open_seal(raw: bytes) -> dict:
    """The line's content. Raises ValueError saying what is wrong with it."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError("it is cut off or not JSON") from error
    if not isinstance(line, dict) or _seal({k: v for k, v in line.items() if k != "check"}).strip() != raw.strip():
        raise ValueError("its checksum does not match")
    return line


def plain_name(path: Path) -> Path:
    """``path`` without ``.xz``."""
    path = Path(path)
    return path.with_suffix("") if path.suffix == FINISHED else path


def finished_name(path: Path) -> Path:
    """``path`` with ``.xz``: where the records named ``path`` lie once they are finished."""
    path = plain_name(path)
    return path.with_name(path.name + FINISHED)


def list_records(folder: Path) -> list[Path]:
    """Sorted plain names of the records files in ``folder``, finished or not."""
    patterns = ("*.jsonl", f"*.jsonl{FINISHED}")
    return sorted({plain_name(file) for pattern in patterns for file in Path(folder).glob(pattern)})


def _read(path: Path) -> tuple[Path, bytes, bool]:
    """The file that holds the records named ``path``, their text, and whether that is all of it."""
    plain, finished = plain_name(path), finished_name(path)
    try:
        return plain, plain.read_bytes(), True
    except FileNotFoundError:
        pass
    try:
        return finished, *_expand(finished.read_bytes())
    except FileNotFoundError:
        return plain, b"", True


def _expand(data: bytes) -> tuple[bytes, bool]:
    """The text in xz ``data`` and True; of damaged data the whole lines that can still be had, and False."""
    stream, parts = lzma.LZMADecompressor(lzma.FORMAT_XZ), []
    try:
        for start in range(0, len(data), 4096):
            parts.append(stream.decompress(data[start : start + 4096]))
    except (lzma.LZMAError, EOFError):
        pass
    text = b"".join(parts)
    if stream.eof and not stream.unused_data:
        return text, True
    return text[: text.rfind(b"\n") + 1], False


class Records:
    """The content of one records file: ``cells`` by key[:16], and ``damage``, one sentence per bad line.

    ``path`` is the file that was read. A compressed file that is damaged is one sentence.
    """

    def __init__(self, path: Path):
        self.path, raw, is_whole = _read(path)
        self.cells: dict[str, Cell] = {}
        self.damage: list[str] = []
        self._orphans: dict[str, list[dict]] = {}
        lines = raw.split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line and number == len(lines):
                break
            try:
                if number == len(lines):
                    raise ValueError("it is cut off or not JSON")
                self._take(_open_seal(line))
            except (ValueError, KeyError, TypeError) as error:
                self.damage.append(f"line {number} of {show(self.path)} is damaged ({error})")
        if not is_whole:
            self.damage = [f"{show(self.path)} is damaged (its compressed data is cut off or was changed)"]

    def _take(self, line: dict) -> None:
        kind = line["kind"]
        if kind == "cell":
            identity = line["identity"]
            if line["key"] != key_of(identity):
                raise ValueError("its key does not belong to its identity")
            self.start(identity, line["provenance"])
        elif kind in ("answer", "score"):
            if (cell := self.cells.get(line["cell"])) is None:
                self._orphans.setdefault(line["cell"], []).append(line)
            elif kind == "answer":
                values = {k: line[k] for k in ("problem", "index", "response", "tokens", "finished", "correct")}
                cell.answers.setdefault(line["problem"], Answer(**values))
            elif answer := cell.answers.get(line["problem"]):
                cell.answers[line["problem"]] = Answer(**{**vars(answer), "correct": line["correct"]})
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def start(self, identity: dict, provenance: dict) -> Cell:
        """The cell of ``identity``, made if it is new; answers whose header was lost are found again by the key."""
        short = key_of(identity)[:16]
        if short not in self.cells:
            self.cells[short] = Cell(identity, provenance)
            for line in self._orphans.pop(short, []):
                self._take(line)
        return self.cells[short]


def read_records(path: Path) -> Records:
    """Records for tables and figures, where nothing can be computed again (kept while the file does not change).

    Raises:
        ResidualQuantError: a line is damaged.
    """
    records = _read_once(path, (_version(plain_name(path)), _version(finished_name(path))))
    if records.damage:
        raise ResidualQuantError(f"{records.damage[0]}; `make reproduce` of its profile computes it again")
    return records


def _version(file: Path) -> tuple[int, int, int] | None:
    """What tells one state of a file from another; None where there is none."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@functools.lru_cache(maxsize=16)
def _read_once(path: Path, versions: tuple) -> Records:
    """The content while the ``versions`` of the plain and of the finished file are the same."""
    return Records(path)


def serialise(records: Records, drop: Iterable[str] = ()) -> bytes:
    """The sorted file: cells by identity, answers by problem index, scores merged in; cells in ``drop`` left out."""
    drop = set(drop)
    out = []
    for short, cell in sorted(records.cells.items(), key=lambda item: _canonical(item[1].identity)):
        if short not in drop:
            out.append(_cell_line(cell))
            out += [_answer_line(short, a) for a in sorted(cell.answers.values(), key=lambda a: (a.index, a.problem))]
    return b"".join(out)


def _cell_line(cell: Cell) -> bytes:
    return _seal({"kind": "cell", "key": cell.key, "identity": cell.identity, "provenance": cell.provenance})


def _answer_line(short: str, answer: Answer) -> bytes:
    return _seal({"kind": "answer", "cell": short, **vars(answer)})


def _without_damage(raw: bytes) -> bytes:
    """``raw`` without its damaged lines (answers whose header is lost stay: the key finds them)."""
    kept = []
    for line in raw.split(b"\n")[:-1]:
        try:
            _open_seal(line)
        except ValueError:
            continue
        kept.append(line + b"\n")
    return b"".join(kept)


class Lock:
    """Context manager that lets one process at a time write; the lock dies with its holder, even by SIGKILL."""

    def __init__(self, target: Path):
        self.target = Path(target)
        self.path = self.target.parent / f".{self.target.name}.lock"

    def __enter__(self) -> Lock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._file, 20).decode(errors="replace") or "unknown"
            os.close(self._file)
            if isinstance(error, BlockingIOError):
                message = f"{show(self.target)} is being written by another run (process {holder}); wait for it to end"
            else:
                message = f"{show(self.target)} cannot be locked here ({error.strerror}); use a local disk"
            raise ResidualQuantError(message) from error
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)
        return self

    def __exit__(self, *exc) -> None:
        os.ftruncate(self._file, 0)
        os.close(self._file)

    def holder(self) -> str | None:
        """Id of the process that holds the lock at this moment; None where none does."""
        try:
            file = os.open(self.path, os.O_RDONLY)
        except OSError:
            return None
        try:
            if named := os.read(file, 20).decode(errors="replace"):  # a killed holder's name stays in the file
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return named
        except OSError:
            pass
        finally:
            os.close(file)
        return None


class Writer:
    """The one writer of a records file: repairs damage, appends, and sorts and compresses it when it is complete.

    Use as a context manager. ``records`` is what the file holds, kept up to date. A finished file is expanded first
    and stays until it is finished again.

    Raises:
        ResidualQuantError: another process is writing, or the disk is full (everything appended before stays).
    """

    def __init__(self, path: Path):
        self.path = plain_name(path)
        self._lock = Lock(self.path)
        self._file: int | None = None

    def __enter__(self) -> Writer:
        self._lock.__enter__()
        try:
            self.records = Records(self.path)
            self._open()
        except BaseException:
            self._lock.__exit__()
            raise
        return self

    def __exit__(self, *exc) -> None:
        self._close()
        self._lock.__exit__()

    def _open(self) -> None:
        """Open the plain file for appending: repaired, or expanded from the finished file, if need be."""
        file, text, _ = _read(self.path)
        if text and not text.startswith(_START) and not _without_damage(text):
            raise ResidualQuantError(f"{show(file)} holds no records: move it away or name another file")
        write_atomic(self.path, _without_damage(text) if self.records.damage else text)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, data: bytes) -> None:
        if self._file is None:  # it was finished, and goes on
            self._open()
        size = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            os.ftruncate(self._file, size)
            done = sum(len(c.answers) for c in self.records.cells.values())
            raise ResidualQuantError(
                f"{show(self.path)} could not be extended ({error.strerror}); its {done} answers are safe: "
                "make room and run the same command again"
            ) from error

    def start(self, identity: dict, provenance: dict) -> Cell:
        """The cell of ``identity``; a new one's header is written at once."""
        is_new = key_of(identity)[:16] not in self.records.cells
        cell = self.records.start(identity, provenance)
        if is_new:
            self._append(_cell_line(cell))
        return cell

    def add(self, cell: Cell, answer: Answer) -> None:
        """Append one answer."""
        self._append(_answer_line(cell.key[:16], answer))
        cell.answers[answer.problem] = answer

    def score(self, cell: Cell, verdicts: Mapping[str, bool]) -> None:
        """Append the scores of {problem id: correct} and bring everything to the disk."""
        short = cell.key[:16]
        lines = [{"kind": "score", "cell": short, "problem": p, "correct": c} for p, c in verdicts.items()]
        self._append(b"".join(_seal(line) for line in lines))
        for problem, correct in verdicts.items():
            cell.answers[problem] = Answer(**{**vars(cell.answers[problem]), "correct": correct})
        os.fsync(self._file)

    def finish(self, superseded: Iterable[str] = ()) -> bool:
        """Store the file sorted and compressed, without the cells whose key[:16] is in ``superseded``.

        Returns False, and leaves the compressed file as it is, when that holds the same already. Killed between the
        two steps, both files hold the same answers.
        """
        superseded = list(superseded)
        content, finished = serialise(self.records, superseded), finished_name(self.path)
        changed = not finished.is_file() or _expand(finished.read_bytes()) != (content, True)
        if changed:
            write_atomic(finished, lzma.compress(content, preset=9))
        self._close()
        self.path.unlink(missing_ok=True)
        for short in superseded:
            self.records.cells.pop(short, None)
        return changed
