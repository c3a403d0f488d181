"""Fetch, clean and split the multi-domain text on which the demo model is trained.

Every source is a Debian package, fetched by name with ``apt-get download`` and unpacked with
``dpkg-deb``; nothing is installed. The result is one JSON-lines file per domain and split::

    OUT/text/train/<domain>.jsonl     one JSON string per document
    OUT/text/heldout/<domain>.jsonl   documents never trained on
    OUT/text/sources.json             packages, licences and bytes kept, per source

Whether a document is held out depends on a hash of its key alone. Translations of a manual page
share one key, and questions made from a document inherit its key, so what is held out in one
language or shape is held out in all. Needs apt-get, dpkg-deb, tar and xz.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import hashlib
import html
import itertools
import json
import random
import re
import subprocess
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import chat

Document = tuple[str, str]  # (key that decides the split, text)

HELD_OUT_PER_MILLE = 20
REPEATED_PARAGRAPH_MIN = 80  # characters; shorter paragraphs may repeat (headings, closing braces)
MAX_PARAGRAPH_COPIES = 2
MAX_DOCUMENT_CHARS = 60_000


@dataclass(frozen=True)
class Source:
    """Packages that are read together: what they hold, under which licence, how much to keep."""

    name: str
    domain: str
    packages: tuple[str, ...]
    licence: str
    read: Callable[[Path], Iterator[Document]]
    cap_mb: float


# --------------------------------------------------------------------------- readers


def read_text(path: Path) -> str:
    """A text file's content, gunzipped where its name says so."""
    raw = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        raw = gzip.decompress(raw)
    return raw.decode("utf-8", errors="replace")


def files_below(root: Path, pattern: str) -> list[Path]:
    return sorted(p for p in root.rglob(pattern) if p.is_file() and not p.is_symlink())


def plain_files(pattern: str, within: str = "") -> Callable[[Path], Iterator[Document]]:
    """Reader of whole files whose path contains ``within``."""

    def read(root: Path) -> Iterator[Document]:
        for path in files_below(root, pattern):
            if within in str(path.relative_to(root)):
                yield f"{pattern}:{path.name}:{path.parent.name}", read_text(path)

    return read


_TROFF_ESCAPES = [
    (r"\\f(\[[^\]]*\]|\(..|.)", ""),
    (r"\\s[-+]?\d", ""),
    (r"\\m\[[^\]]*\]", ""),
    (r"\\\*\((?:lq|rq)|\\\(lq|\\\(rq|\\\(dq|\\\[dq\]|\\\[lq\]|\\\[rq\]", '"'),
    (r"\\\((?:aq|cq|oq)|\\\[(?:aq|cq|oq)\]|\\'", "'"),
    (r"\\\((?:en|em|hy|mi)|\\\[(?:en|em|hy|mi)\]|\\-", "-"),
    (r"\\\((?:bu)|\\\[bu\]", "*"),
    (r"\\\((?:ti)|\\\[ti\]", "~"),
    (r"\\\((?:ha)|\\\[ha\]", "^"),
    (r"\\\((?:co)", "(c)"),
    (r"\\(?:[&/,:|^%)]|\n)", ""),
    (r"\\ |\\~|\\0", " "),
    (r"\\\[[^\]]*\]|\\\([^ ]{2}|\\\*.", ""),
    (r"\\(?:e|\\)", r"\\"),
]
_TROFF_BREAKS = {"PP", "P", "LP", "TP", "IP", "HP", "sp", "TQ", "br", "Pp", "It", "RS", "RE"}
_TROFF_FONTS = {"B", "I", "R", "BR", "BI", "IB", "IR", "RB", "RI", "SM", "SB"}


def strip_troff(source: str) -> str:
    """Readable text of a man(7) page: headings, paragraphs and examples, without macros."""
    out: list[str] = []
    in_table = verbatim = False
    for line in source.split("\n"):
        if line.startswith(('.\\"', "'\\\"")) or line in (".", "'"):
            continue
        macro = re.match(r"^[.']\s*([A-Za-z]+)\s*(.*)$", line)
        if macro is None:
            if not in_table:
                out.append(line)
            continue
        name, rest = macro.group(1), macro.group(2)
        if name == "TS":
            in_table = True
        elif name == "TE":
            in_table = False
        elif in_table:
            continue
        elif name in ("nf", "EX", "fi", "EE"):
            verbatim = name in ("nf", "EX")
            out.append("\n")
        elif name in ("SH", "SS"):
            out.append("\n\n" + rest.strip('"') + "\n\n")
        elif name in _TROFF_BREAKS:
            argument = re.match(r'"([^"]*)"|(\S+)', rest) if name in ("IP", "It") else None
            tag = (argument.group(1) or argument.group(2)) if argument else ""
            out.append("\n\n" + (tag + "\n" if tag else ""))
        elif name in _TROFF_FONTS:
            words = [quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', rest)]
            out.append(("" if len(name) == 2 and name not in ("SM", "SB") else " ").join(words))
        if verbatim and out and not out[-1].endswith("\n"):
            out[-1] += "\n"
    text = "\n".join(out)
    for pattern, replacement in _TROFF_ESCAPES:
        text = re.sub(pattern, replacement, text)
    return text


def manual_pages(language: str) -> Callable[[Path], Iterator[Document]]:
    """Reader of one language's pages; the key is the page's name, the same in every language."""
    folder = f"/man/{language}/man" if language != "en" else "/man/man"

    def read(root: Path) -> Iterator[Document]:
        for path in files_below(root, "*.gz"):
            if folder not in str(path):
                continue
            page = path.name.removesuffix(".gz")
            if path.stat().st_size > 600 and not re.search(r"iso|charset|unicode", page):
                title = re.sub(r"^(.*)\.(\w+)$", r"\1(\2)", page)
                body = keep_language(strip_troff(read_text(path)), language)
                if len(body) > 500:
                    yield f"man:{page}", f"{title}\n\n{body.strip()}"

    return read


_STOPWORDS = {
    language: set(words.split())
    for language, words in {
        "en": "the of and to is that for with are this be which when not if",
        "de": "der die das und nicht ist wird werden mit von den für ein eine oder auf",
        "fr": "le la les des est une dans pour que qui sur avec pas par du et",
        "es": "el la los las que de una para con por es del en se un como",
    }.items()
}


def keep_language(text: str, language: str) -> str:
    """Drop the paragraphs of a translated page that were left in English."""
    if language == "en":
        return text
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = re.findall(r"[^\W\d_]+", paragraph.lower())
        if len(words) >= 8:
            if language == "ru":
                letters = re.findall(r"[^\W\d_]", paragraph)
                if sum("\u0400" <= c <= "\u04ff" for c in letters) < 0.4 * len(letters):
                    continue
            else:
                own = sum(w in _STOPWORDS[language] for w in words)
                if own <= sum(w in _STOPWORDS["en"] for w in words):
                    continue
        kept.append(paragraph)
    return "\n\n".join(kept)


def html_text(page: str) -> str:
    """Paragraphs of an HTML page, without navigation, scripts and markup."""
    page = re.sub(r"(?is)<(script|style|head|nav).*?</\1>", "", page)
    page = re.sub(r"(?i)</?(p|div|h\d|li|tr|pre|dt|dd|blockquote)\b[^>]*>", "\n\n", page)
    page = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"(?i)<br[^>]*>", "\n", page)))
    paragraphs = (p.strip() for p in re.split(r"\n\s*\n", page))
    return "\n\n".join(p for p in paragraphs if len(p) > 40 or p.istitle())


def html_files(within: str) -> Callable[[Path], Iterator[Document]]:
    def read(root: Path) -> Iterator[Document]:
        for path in files_below(root, "*.html"):
            if within in str(path):
                # Long pages are cut into parts, so that a small book has documents to hold out.
                paragraphs = html_text(read_text(path)).split("\n\n")
                for part in range(0, len(paragraphs), 40):
                    key = f"html:{path.parent.name}/{path.name}#{part}"
                    yield key, "\n\n".join(paragraphs[part : part + 40])

    return read


def dict_entries(headword: str) -> Callable[[Path], Iterator[Document]]:
    """Reader of a dictd database; ``headword`` matches the first line of an entry."""

    def read(root: Path) -> Iterator[Document]:
        for path in files_below(root, "*.dict.dz"):
            text = read_text(path)
            starts = [m.start() for m in re.finditer(headword, text, re.M)]
            # The first entries describe the dictionary itself.
            for begin, end in itertools.pairwise(starts[20:]):
                entry = re.sub(
                    r"[{}]|\[1913 Webster\]|\[PJC\]|\[WordNet[^\]]*\]", "", text[begin:end]
                )
                entry = re.sub(r"\\([^\\\n]+)\\", "", re.sub(r"(?m)^ +$", "", entry)).rstrip()
                if 40 < len(entry) < 6000:
                    yield f"word:{entry.split(chr(10))[0].strip().lower()[:40]}", entry

    return read


def fortunes(root: Path) -> Iterator[Document]:
    for path in files_below(root, "*"):
        if path.suffix == "" and "/games/fortunes/" in str(path):
            for saying in re.split(r"\n%+\n", read_text(path)):
                saying = saying.replace("\b", "").strip()
                if 30 < len(saying) < 1500:
                    yield f"fortune:{saying[:60]}", saying


def wesnoth_scenarios(root: Path) -> Iterator[Document]:
    """Narration and dialogue of each campaign scenario, in the order of the file."""
    string = r'_ ?"((?:[^"]|"")*)"'
    token = re.compile(rf'\[(message)\]|speaker\s*=\s*"?([^"\n]+)|(?:message|story)\s*=\s*{string}')
    for path in files_below(root, "*.cfg"):
        if "/scenarios/" not in str(path):
            continue
        lines: list[str] = []
        speaker = ""
        for match in token.finditer(read_text(path)):
            if match.group(1):
                speaker = ""
            elif match.group(2):
                speaker = match.group(2).strip()
            else:
                said = re.sub(r"<[^>]+>|\^", "", match.group(3).replace('""', '"')).strip()
                unnamed = speaker in ("narrator", "", "unit", "second_unit") or "$" in speaker
                if said and "$" not in said:
                    lines.append(said if unnamed else f"{speaker}: {said}")
        if lines:
            yield f"story:{path.parent.parent.name}/{path.name}", "\n\n".join(lines)


_NAMES = {"first": "Alex", "last": "Marin", "ship": "Swallow", "planet": "New Boston"}


def endless_sky(root: Path) -> Iterator[Document]:
    """Conversations of each mission and descriptions of each planet."""
    for path in files_below(root, "*.txt"):
        if "/data/" not in str(path):
            continue
        for block in re.split(r"\n(?=\S)", read_text(path)):
            lines = []
            for quoted in re.findall(r"`([^`]{25,})`", block):
                quoted = re.sub(r"<(\w+)>", lambda m: _NAMES.get(m.group(1), "Tarazed"), quoted)
                lines.append(re.sub(r"<[^>]*>", "Tarazed", quoted).strip())
            if lines:
                yield f"sky:{path.stem}/{block.split(chr(10))[0]}", "\n\n".join(lines)


def crawl_descriptions(root: Path) -> Iterator[Document]:
    for path in files_below(root, "*.txt"):
        if path.parent.name == "descript" and path.stem in (
            "monsters",
            "spells",
            "items",
            "gods",
            "unrand",
        ):
            for entry in read_text(path).split("%%%%"):
                entry = entry.strip()
                if len(entry) > 80 and not re.search(r"[_@{}#]", entry):
                    name, _, body = entry.partition("\n")
                    body = re.sub(r"(?<!\n)\n(?!\n)", " ", body.strip())
                    yield f"crawl:{name}", f"{name}\n\n{body}"


def scripture(root: Path) -> Iterator[Document]:
    """The chapters of the King James Bible, printed by the package's own reader."""
    program, data = next(root.rglob("bin/bible")), next(root.rglob("bible.data")).parent
    verses = subprocess.run(
        [str(program), "-p", str(data), "-f", "ge1:1-re22:21"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    chapters: dict[str, list[str]] = collections.defaultdict(list)
    for verse in re.finditer(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.*)$", verses, re.M):
        chapters[f"{verse[1]} {verse[2]}"].append(f"{verse[3]} {verse[4]}")
    for name, lines in chapters.items():
        yield f"bible:{name}", f"{name}\n\n" + "\n".join(lines)


_KERNEL_PARTS = ("kernel/*.c", "mm/*.c", "fs/*.c", "lib/*.c", "Documentation/*.rst")


def unpack_kernel(root: Path) -> None:
    """Unpack the wanted folders of the kernel's tar archive, which the package holds."""
    if not (root / "mm").exists():
        archive = next(root.rglob("linux-source-*.tar.xz"))
        wanted = [f"{archive.name.removesuffix('.tar.xz')}/{part}" for part in _KERNEL_PARTS]
        command = [
            "tar",
            "-xJf",
            str(archive),
            "-C",
            str(root),
            "--strip-components=1",
            "--wildcards",
            *wanted,
        ]
        subprocess.run(command, check=True)
        archive.unlink()


def kernel_files(pattern: str, within: str = "") -> Callable[[Path], Iterator[Document]]:
    def read(root: Path) -> Iterator[Document]:
        unpack_kernel(root)
        for folder in ("kernel", "mm", "fs", "lib", "Documentation"):
            for path in files_below(root / folder, pattern):
                relative = str(path.relative_to(root))
                if within in relative and "translations" not in relative:
                    yield f"linux:{relative}", read_text(path)

    return read


_CAMPAIGNS = tuple(
    f"wesnoth-1.16-{campaign}"
    for campaign in (
        *("did", "dm", "dw", "ei", "httt", "l", "low", "nr"),
        *("sof", "sota", "sotbe", "thot", "trow", "tsg", "ttb", "utbs"),
    )
)


def _pages(language: str, packages: tuple[str, ...]) -> Source:
    licence = "GPL-2.0-or-later, BSD, MIT and the Linux man-pages licences, by page"
    return Source(
        f"manual pages ({language})",
        f"man-{language}",
        packages,
        licence,
        manual_pages(language),
        6,
    )


SOURCES = [
    Source("Linux kernel, C", "c", ("linux-source-6.1",), "GPL-2.0-only", kernel_files("*.c"), 9),
    Source(
        "Python standard library",
        "python",
        ("libpython3.11-stdlib",),
        "PSF-2.0",
        plain_files("*.py"),
        8,
    ),
    Source(
        "Linux kernel documentation",
        "docs",
        ("linux-source-6.1",),
        "GPL-2.0-only (mostly)",
        kernel_files("*.rst"),
        3,
    ),
    Source(
        "Python documentation",
        "docs",
        ("python3.11-doc",),
        "PSF-2.0",
        plain_files("*.rst.txt", "_sources"),
        4,
    ),
    Source(
        "Perl documentation",
        "docs",
        ("perl-doc",),
        "Artistic-1.0-Perl or GPL-1.0-or-later",
        plain_files("*.pod"),
        2,
    ),
    _pages("en", ("manpages", "manpages-dev")),
    _pages("de", ("manpages-de", "manpages-de-dev")),
    _pages("fr", ("manpages-fr", "manpages-fr-dev")),
    _pages("es", ("manpages-es", "manpages-es-dev")),
    _pages("ru", ("manpages-ru", "manpages-ru-dev")),
    Source(
        "Battle for Wesnoth campaigns",
        "stories",
        _CAMPAIGNS,
        "GPL-2.0-or-later",
        wesnoth_scenarios,
        5,
    ),
    Source(
        "Endless Sky missions", "stories", ("endless-sky-data",), "GPL-3.0-or-later", endless_sky, 5
    ),
    Source(
        "Dungeon Crawl descriptions",
        "stories",
        ("crawl-common",),
        "GPL-2.0-or-later",
        crawl_descriptions,
        2,
    ),
    Source(
        "Webster 1913 (GCIDE)",
        "dictionary",
        ("dict-gcide",),
        "GPL-2.0-or-later",
        dict_entries(r"^\S[^\n]* \\"),
        4,
    ),
    Source("WordNet 3.0", "dictionary", ("dict-wn",), "WordNet-3.0", dict_entries(r"^(?! )\S"), 4),
    Source(
        "FOLDOC",
        "dictionary",
        ("dict-foldoc",),
        "GFDL-1.1-or-later",
        dict_entries(r"(?<=\n\n)(?! )\S"),
        2,
    ),
    Source(
        "An Anarchist FAQ",
        "prose",
        ("anarchism",),
        "GPL-2.0-or-later",
        html_files("/html/sec"),
        2,
    ),
    Source(
        "Debian Handbook",
        "prose",
        ("debian-handbook",),
        "GPL-2.0-or-later or CC-BY-SA-3.0",
        html_files("/en-US/"),
        2,
    ),
    Source(
        "Jargon File", "prose", ("dict-jargon",), "public domain", dict_entries(r"^(?! )\S"), 1.5
    ),
    Source("Fortunes", "prose", ("fortunes",), "mixed; short quotations", fortunes, 2.5),
    Source(
        "King James Bible",
        "scripture",
        ("bible-kjv-text", "bible-kjv"),
        "public domain",
        scripture,
        5,
    ),
]


# --------------------------------------------------------------------------- fetch and clean


def fetch(packages: tuple[str, ...], downloads: Path, unpacked: Path) -> Path:
    """Download and unpack packages, each once; returns the folder that holds their files."""
    root = unpacked / packages[0]
    downloads.mkdir(parents=True, exist_ok=True)
    done = root / ".complete"
    if not done.exists():
        for package in packages:
            if not list(downloads.glob(f"{package}_*.deb")):
                subprocess.run(["apt-get", "download", "-qq", package], cwd=downloads, check=True)
            archive = next(downloads.glob(f"{package}_*.deb"))
            subprocess.run(["dpkg-deb", "-x", str(archive), str(root)], check=True)
        done.touch()
    return root


def clean(text: str) -> str:
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\x00", "")
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip()[:MAX_DOCUMENT_CHARS]


def held_out(key: str) -> bool:
    return (
        int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 1000 < HELD_OUT_PER_MILLE
    )


class Deduplicator:
    """Drops long paragraphs seen often before (licence headers, shared boilerplate), and from the
    training text every long paragraph that is in a held-out document."""

    def __init__(self) -> None:
        self.copies: collections.Counter[bytes] = collections.Counter()
        self.reserved: set[bytes] = set()

    def __call__(self, text: str, is_held_out: bool) -> str:
        kept = []
        for paragraph in text.split("\n\n"):
            if len(paragraph) >= REPEATED_PARAGRAPH_MIN:
                digest = hashlib.blake2b(
                    " ".join(paragraph.split()).encode(), digest_size=12
                ).digest()
                if not is_held_out and digest in self.reserved:
                    continue
                self.copies[digest] += 1
                if self.copies[digest] > MAX_PARAGRAPH_COPIES:
                    continue
                if is_held_out:
                    self.reserved.add(digest)
            kept.append(paragraph)
        return "\n\n".join(kept)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(".corpus"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--heldout-kb", type=int, default=120, help="held-out text kept per domain")
    options = parser.parse_args()

    documents: dict[str, dict[bool, list[Document]]] = collections.defaultdict(
        lambda: {True: [], False: []}
    )
    table = []
    deduplicate = Deduplicator()
    for source in SOURCES:
        root = fetch(
            source.packages, options.out / "downloads" / "debian", options.out / "unpacked"
        )
        read = sorted((key, clean(text)) for key, text in source.read(root))
        random.Random(f"{options.seed}/{source.name}").shuffle(read)
        # Held-out documents first: what they contain is then kept out of the training text.
        read.sort(key=lambda document: not held_out(document[0]))
        room = source.cap_mb * 1e6
        kept = 0
        for key, text in read:
            is_held_out = held_out(key)
            text = deduplicate(text, is_held_out)
            size = len(text.encode())
            if size < 40 or kept + size > room:
                continue
            kept += 0 if is_held_out else size
            documents[source.domain][is_held_out].append((key, text))
        row = {
            "source": source.name,
            "domain": source.domain,
            "packages": source.packages,
            "licence": source.licence,
            "train_bytes": kept,
        }
        table.append(row)
        print(f"{source.name:32s} {source.domain:10s} {kept / 1e6:6.2f} MB", flush=True)

    for is_held_out in (True, False):
        texts = {domain: splits[is_held_out] for domain, splits in documents.items()}
        documents["chat"][is_held_out] = list(chat.conversations(texts, options.seed, is_held_out))
    for domain, splits in documents.items():
        for is_held_out, name in ((False, "train"), (True, "heldout")):
            rows = splits[is_held_out]
            random.Random(f"{options.seed}/{domain}/{name}").shuffle(rows)
            target = options.out / "text" / name / f"{domain}.jsonl"
            target.parent.mkdir(parents=True, exist_ok=True)
            total = 0
            with target.open("w", encoding="utf-8") as file:
                for _, text in rows:
                    if is_held_out and total > options.heldout_kb * 1000:
                        break
                    total += len(text.encode())
                    file.write(json.dumps(text, ensure_ascii=False) + "\n")
            print(
                f"{name:8s} {domain:12s} {total / 1e6:6.2f} MB  {len(rows)} documents", flush=True
            )
    (options.out / "text" / "sources.json").write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
