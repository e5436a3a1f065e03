"""Tests of `aiordma doctor` on this machine, and of its facts on a fictitious one."""

from __future__ import annotations

import json
import os
import resource
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

import aiordma
from aiordma import verbs
from aiordma.cli import doctor_facts as facts
from aiordma.cli.app import app
from aiordma.cli.doctor_checks import Conclusion
from aiordma.cli.doctor_facts import Facts
from tests.processes import run_python

# ---- this machine -------------------------------------------------------------------------------


def test_doctor_json_describes_this_machine(device: verbs.Device) -> None:
    """Without a card, the command fails only if AIORDMA_DEVICE asks for one.

    Otherwise programs can use the embedded device.
    """
    system = [found for found in verbs.devices() if found.library.name == "system"]
    done = CliRunner().invoke(app, ["doctor", "--json"])
    told = json.loads(done.output)
    assert done.exit_code == told["status"]
    assert told["versions"].keys() == {"aiordma", "python", "system"}
    assert told["versions"]["aiordma"] == aiordma.__version__
    findings = {finding["check"]: finding for finding in told["findings"]}
    assert findings["embedded"]["verdict"] in ("ok", "warning")
    assert {"library", "kernel", "memlock"} <= findings.keys()
    if not system:
        assert told["status"] == 0, done.output
        asked = CliRunner().invoke(app, ["doctor"], env={"AIORDMA_DEVICE": "system"})
        assert asked.exit_code == 1
        assert "problem" in (findings["library"]["verdict"], findings["kernel"]["verdict"])
    if device in system:
        assert told["summary"] == Conclusion.READY.text
        assert device.name in findings["kernel"]["text"]
        assert device.name in findings["providers"]["text"]
        assert f"port 1 of {device.name} is ACTIVE" in done.output


def test_doctor_table_matches_the_json() -> None:
    as_json = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == as_json["status"]
    assert max(map(len, done.output.splitlines())) <= 80
    assert done.output.splitlines()[-1] == as_json["summary"]
    lines = [line.split()[:2] for line in done.output.splitlines()]
    for finding in as_json["findings"]:
        assert [finding["verdict"], finding["check"]] in lines


def test_doctor_reports_an_unknown_environment_variable_once() -> None:
    done = run_python("-m", "aiordma", "doctor", "--json", AIORDMA_EMBEDDED_FAULT="loss=1")
    assert done.stderr == ""
    [finding] = [it for it in json.loads(done.stdout)["findings"] if it["check"] == "environment"]
    assert finding == {
        "check": "environment",
        "verdict": "warning",
        "text": "unknown environment variable AIORDMA_EMBEDDED_FAULT: did you mean "
        "AIORDMA_EMBEDDED_FAULTS?",
        "advice": "correct the name or unset the variable, because it has no effect",
    }


def test_collected_facts_match_this_machine() -> None:
    found = Facts.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert (found.memlock, found.memlock_hard) == (soft, hard)
    assert found.kernel == os.uname().release
    assert found.embedded.name == "embedded0"
    assert not found.embedded.problem
    assert {device.name for device in found.devices} == {
        device.name for device in verbs.devices() if device.library.name == "system"
    }


# ---- a made-up one ------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_facts_are_empty_when_system_files_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    found = Facts.collect(tmp_path)
    assert (found.providers, found.kernel_devices, found.modules) == ((), {}, ())
    assert (found.has_uverbs, found.has_rdma_cm, found.nodes) == (False, False, ())
    assert not found.ignores_memlock
    assert found.container == ""


def test_facts_include_providers_devices_and_modules(tmp_path: Path) -> None:
    loaded = "rdma_rxe 1 0 - Live 0x0", "ext4 1 0 - Live 0x0", "", "ib_core 1 6 x,y, Live 0x0"
    files = {
        "etc/libibverbs.d/mlx5.driver": "driver mlx5\n",
        "etc/libibverbs.d/two": "# not a driver\ndriver a\ndriver b\ndriver\n",
        "sys/class/misc/rdma_cm/abi_version": "4",
        "proc/modules": "\n".join(loaded),
    }
    write(tmp_path, files)
    classes = tmp_path / "sys/class/infiniband"
    for name in (classes / "rxe0", classes / "mlx5_0/device", tmp_path / "drivers/mlx5_core"):
        name.mkdir(parents=True)
    (classes / "mlx5_0/device/driver").symlink_to(tmp_path / "drivers/mlx5_core")
    (tmp_path / "sys/class/infiniband_verbs").mkdir()
    found = Facts.collect(tmp_path)
    assert found.providers == ("a", "b", "mlx5")
    assert found.kernel_devices == {"mlx5_0": "mlx5_core", "rxe0": ""}
    assert found.modules == ("ib_core", "rdma_rxe")
    assert (found.has_uverbs, found.has_rdma_cm) == (True, True)


def test_device_nodes_report_access_and_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dev/infiniband"
    write(folder, {"uverbs0": "", "rdma_cm": "", "by-path/pci-0": ""})
    (folder / "dangling").symlink_to("nowhere")
    (folder / "uverbs0").chmod(0o600)
    allowed = {folder / "rdma_cm"}
    monkeypatch.setattr(
        os, "access", lambda path, mode: path in allowed and mode == os.R_OK | os.W_OK
    )
    cm, uverbs = facts.nodes(tmp_path)
    assert (cm.path, cm.usable) == ("/dev/infiniband/rdma_cm", True)
    assert (uverbs.path, uverbs.usable) == ("/dev/infiniband/uverbs0", False)
    assert uverbs.rights == f"{stat.filemode(0o100600)} {os.getuid()}:{os.getgid()}"


@pytest.mark.parametrize(
    ("capabilities", "ignores"), [("4000", True), ("1bfff", False), ("0", False)]
)
def test_memlock_limit_is_ignored_with_ipc_lock_capability(
    capabilities: str, ignores: bool, tmp_path: Path
) -> None:
    status = f"Name:\tx\nCapPrm:\t{'f' * 16}\nCapEff:\t{capabilities:0>16}\n"
    write(tmp_path, {"proc/self/status": status})
    assert Facts.collect(tmp_path).ignores_memlock is ignores


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({".dockerenv": ""}, "docker"),
        ({"run/.containerenv": ""}, "podman"),
        ({"proc/1/environ": "HOME=/\0container=lxc\0"}, "lxc"),
        ({"proc/1/environ": "HOME=/\0"}, ""),
    ],
)
def test_container_type_is_detected(
    files: dict[str, str], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    write(tmp_path, files)
    assert facts.container(tmp_path) == kind
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert facts.container(tmp_path) == (kind or "kubernetes")
