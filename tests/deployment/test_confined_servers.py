"""The server as the image and the unit run it, from a wheel and without the checkout: read-only but for its cache, under another user."""

import errno
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.engine.model.store import DEFAULT_MODEL, resolve_model
from tests.clients.programs import needs
from tests.deployment.confinement import PREFIX, Confinement, Server, install
from tests.deployment.distributions import build, sources
from tests.deployment.files import DEPLOY, Unit, compose, dockerfile, image_environment
from tests.deployment.tools import module

pytestmark = pytest.mark.deployment

CACHE = "/var/cache/penstock"
KEY = "secret"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs("bwrap")
    folder = tmp_path_factory.mktemp("installed")
    prefix = folder / "prefix"
    prefix.mkdir()
    install(build("wheel", sources(folder / "sources"), folder / "dist"), prefix)
    return prefix


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the default model in `cache`, as it is fetched and converted, and without anything compiled."""
    model = resolve_model(None)
    volume = tmp_path_factory.mktemp("volume")
    volume.chmod(0o2770)  # as fsGroup makes it
    (volume / "cache").mkdir(mode=0o700)
    shutil.copytree(model, volume / "cache" / "models" / model.name)
    return volume


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_serving(server: Server) -> None:
    assert DEFAULT_MODEL.name in server.start_line
    assert "native" in server.start_line
    assert [server.get(path, key) for path in ("/health", "/metrics", "/v1/models") for key in ("", KEY)] == [200, 200, 200, 200, 401, 200]


def check_ended(server: Server, scratch: Path) -> None:
    code, log = server.end(signal.SIGTERM)
    assert code == 0
    assert not re.search("Read-only|Permission|not permitted|WARNING|ERROR", log), log
    assert list(scratch.iterdir()) == []


def test_the_image_serves_as_compose_runs_it(installed: Path, volume: Path, tmp_path: Path) -> None:
    service = compose()["services"]["penstock"]
    instructions = dict(dockerfile())
    entry = re.findall(r'"(.*?)"', instructions["ENTRYPOINT"])
    port = str(free_port())
    confinement = Confinement(
        {PREFIX: installed, **config_mounts(service)},
        {CACHE: volume, "/tmp": tmp_path},
        {**image_environment(), "PENSTOCK_API_KEY": KEY, "PENSTOCK_PORT": port},
    )
    with confinement.server([*entry, *service["command"]], instructions["WORKDIR"]) as server:
        check_serving(server)
        check_health_command(instructions["HEALTHCHECK"], port)
        check_ended(server, tmp_path)
    assert {path.name for path in (volume / "cache").iterdir()} >= {"models", "native", "prepared"}
    assert [path.name for path in volume.iterdir()] == ["cache"]


def config_mounts(service: Mapping[str, list[str]]) -> dict[str, Path]:
    mounts = (mount.split(":") for mount in service["volumes"])
    return {target: (DEPLOY / source).resolve() for source, target, *_ in mounts if source.startswith(".")}


def check_health_command(instruction: str, port: str) -> None:
    """On this machine, which has the same loopback interface."""
    (words,) = re.findall(r"CMD (\[.*\])", instruction)
    command = [sys.executable, *json.loads(words)[1:]]
    for given, code in ((port, 0), (str(free_port()), 1)):
        done = subprocess.run(command, env={"PENSTOCK_PORT": given}, capture_output=True)
        assert done.returncode == code


def test_the_unit_serves_under_its_restrictions(installed: Path, volume: Path, tmp_path: Path) -> None:
    needs("systemd-analyze")
    unit = Unit(DEPLOY / "systemd" / "penstock.service")
    state, scratch = tmp_path / "state", tmp_path / "scratch"
    state.mkdir()
    scratch.mkdir()
    confinement = Confinement(
        {PREFIX: installed, "/etc/penstock/penstock.toml": DEPLOY / "penstock.toml"},
        {f"/var/cache/{unit['CacheDirectory'][0]}": volume / "cache", f"/var/lib/{unit['StateDirectory'][0]}": state, "/tmp": scratch},
        {
            **unit.environment,
            "NOTIFY_SOCKET": f"{unit['WorkingDirectory'][0]}/notify",
            "PENSTOCK_API_KEY": KEY,
            "PENSTOCK_PORT": str(free_port()),
        },
        seccomp_program(unit, tmp_path / "filter.bpf"),
    )
    (check,), (start,) = unit["ExecStartPre"], unit["ExecStart"]
    assert f'["{"*" * 8}"]' in confinement.run(*check.removeprefix("-").split())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(state / "notify"))
        with confinement.server(start.split(), unit["WorkingDirectory"][0]) as server:
            check_serving(server)
            assert (unit["Type"], supervisor.recv(100)) == (["notify"], b"READY=1")
            check_ended(server, scratch)
    assert [path.name for path in state.iterdir()] == ["notify"]


def seccomp_program(unit: Unit, path: Path) -> Path:
    """What systemd makes of the unit's filters of system calls and address families."""
    allowed, *denied = unit["SystemCallFilter"]
    names = system_calls(allowed).difference(*(system_calls(each.removeprefix("~")) for each in denied))
    pyseccomp = module("pyseccomp")
    program = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    program.set_attr(pyseccomp.Attr.CTL_NNP, False)
    for name in sorted(names):
        if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) >= 0 and name != "socket":
            program.add_rule(pyseccomp.ALLOW, name)
    for family in unit["RestrictAddressFamilies"][0].split():
        program.add_rule(pyseccomp.ALLOW, "socket", pyseccomp.Arg(0, pyseccomp.EQ, getattr(socket, family)))
    for name in ("execve", "exit_group"):  # bubblewrap's own, should the unit not have them
        assert name in names
    with path.open("wb") as file:
        program.export_bpf(file)
    return path


def system_calls(group: str) -> set[str]:
    """Of one of systemd's groups, with those in it."""
    said = subprocess.run(["systemd-analyze", "syscall-filter", group], capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"^    ([@\w-]+)$", said, re.MULTILINE))
    return {name for name in names if not name.startswith("@")}.union(*(system_calls(name) for name in names if name.startswith("@")))
