"""Test that a release made by `make package` has every integration in the same version."""

from __future__ import annotations

import tomllib

from tests.package import INTEGRATIONS, PYPROJECT, ROOT


def test_release_includes_every_integration_at_the_same_version() -> None:
    """All use the same build backend and have the version of aiordma."""
    folders = {it.name for it in (ROOT / "integrations").iterdir()}
    assert {folder for folder, _, _ in INTEGRATIONS.values()} == folders
    for package_name, (folder, _, _) in INTEGRATIONS.items():
        described = tomllib.loads((ROOT / "integrations" / folder / "pyproject.toml").read_text())
        assert described["build-system"] == {
            "requires": PYPROJECT["dependency-groups"]["package"],
            "build-backend": "hatchling.build",
        }
        assert described["project"]["name"].replace("-", "_") == package_name
        assert described["project"]["version"] == PYPROJECT["project"]["version"]
