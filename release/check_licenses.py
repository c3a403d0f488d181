"""Check licences against a list: `pip-licenses --format=json | python release/check_licenses.py`.

A package passes if every part of its licence (`A AND B`, `A; B`) is on the list, or one of several
that it offers (`A OR B`). The list has licences without demands on programs that import a package.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter

ALLOWED = re.compile(
    r"Apache([ -]2\.0|-2\.0 WITH LLVM-exception| 2\.0 License| Software License)"
    r"|BSD([ -]License|-[23]-Clause)|0BSD|BSL-1\.0|CC0-1\.0|CNRI-Python|ISC( License \(ISCL\))?"
    r"|MIT([ -]License|-CMU)?|MPL-2\.0|Mozilla Public License 2\.0 \(MPL 2\.0\)"
    r"|PSF-2\.0|Python Software Foundation License|Zlib"
)


def is_allowed(licence: str) -> bool:
    """Check a licence expression: alternatives of parts that all must be on the list."""
    return any(
        all(
            ALLOWED.fullmatch(part.strip(" ()")) or ALLOWED.fullmatch(part.strip())
            for part in parts
        )
        for parts in (re.split(r" AND |; ", each) for each in licence.split(" OR "))
    )


def main() -> None:
    packages = json.load(sys.stdin)
    refused = [each for each in packages if not is_allowed(each["License"])]
    if refused or not packages:
        lines = [f"{each['Name']} {each['Version']}: {each['License']}" for each in refused]
        raise SystemExit("\n".join(["not on the list of licences:", *lines]))
    print(f"{len(packages)} packages, all on the list")
    for licence, count in Counter(each["License"] for each in packages).most_common():
        print(f"{count:4}  {licence}")


if __name__ == "__main__":
    main()
