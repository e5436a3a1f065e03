"""Write the address of the repository into the metadata and READMEs of a release.

    python -m tests.release https://HOST/OWNER/NAME

The release workflow runs this before it builds, with its own repository, because the project names
no address. The changes are committed, because the sdist has the files of a commit. The commit has
the time of the previous one, so that everyone who runs this gets the same bytes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from .package import INTEGRATIONS, PYPROJECT, ROOT

ADDRESS = re.compile(r"https://[\w.-]+(:\d+)?/[\w.-]+/[\w.-]+")
LINK = re.compile(r"\]\((?!#)([^)\s:#]+)((?:#[^)\s]*)?)\)")
URLS = """
[project.urls]
Source = "{address}"
Issues = "{address}/issues"
Documentation = "{at}/docs/index.md"
Changelog = "{at}/CHANGELOG.md"
"""


def write(project: Path, address: str, version: str) -> list[Path]:
    """Add this version's URLs to a project's pyproject.toml and README.md. Return the paths."""
    at = f"{address}/blob/v{version}"
    described, readme = project / "pyproject.toml", project / "README.md"
    if "[project.urls]" in (text := described.read_text()):
        sys.exit(f"{described} has [project.urls] already: begin with a clean clone")
    described.write_text(text + URLS.format(address=address, at=at))

    def absolute(link: re.Match[str]) -> str:
        path = (project / link[1]).resolve().relative_to(ROOT.resolve())
        return f"]({at}/{path}{link[2]})"

    readme.write_text(LINK.sub(absolute, readme.read_text()))
    return [described, readme]


def main() -> None:
    if len(sys.argv) != 2 or not ADDRESS.fullmatch(sys.argv[1]):
        sys.exit("usage: python -m tests.release https://HOST/OWNER/NAME")
    folders = [ROOT, *(ROOT / "integrations" / it for it, _, _ in INTEGRATIONS.values())]
    version = PYPROJECT["project"]["version"]
    written = [path for it in folders for path in write(it, sys.argv[1], version)]
    last = subprocess.check_output(["git", "log", "-1", "--format=%cI"], cwd=ROOT, text=True)
    who = ("-c", "user.name=release", "-c", "user.email=")
    message = f"release: the address is {sys.argv[1]}"
    subprocess.run(
        ["git", *who, "commit", "--quiet", "--message", message, "--only", "--", *written],
        cwd=ROOT,
        env={**os.environ, "GIT_AUTHOR_DATE": last.strip(), "GIT_COMMITTER_DATE": last.strip()},
        check=True,
    )


if __name__ == "__main__":
    main()
