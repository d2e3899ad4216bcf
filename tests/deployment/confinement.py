"""A server as it is deployed: an installed wheel, a read-only system, a user and processes of its own, and no capabilities."""

import os
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.deployment.files import ROOT

USER = "10001"
USERS = Path(__file__).with_name("users")  # /etc/passwd and /etc/group as the image has them
PREFIX = "/opt/penstock"
DEPENDENCIES = "/opt/dependencies"  # not where they are: the checkout may lie in a directory that is mounted anew, such as /tmp
START_SECONDS = 300  # kernels are compiled
# Directories that are empty but for what is mounted in them.
EMPTY = ("/opt", "/home", "/root", "/run", "/var", "/srv")
KEPT = ("/proc", "/sys", "/dev", "/tmp", "/etc", *EMPTY)


@dataclass(frozen=True)
class Confinement:
    """What a process can see: `readable` and `writable` are directories and files of this machine by the path that they have there."""

    readable: Mapping[str, Path]
    writable: Mapping[str, Path]
    environment: Mapping[str, str] = field(default_factory=dict)
    seccomp: Path | None = None

    def command(self, words: Sequence[str], cwd: str = "/", filter_descriptor: int | None = None) -> list[str]:
        """Of bubblewrap, which has the process end with this one."""
        options = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--uid", USER, "--gid", USER, "--cap-drop", "ALL"]
        options += ["--as-pid-1", "--die-with-parent", "--new-session", "--clearenv", "--chdir", cwd, *self._system()]
        for target, source in self.readable.items():
            options += ["--ro-bind", str(source), target]
        for target, source in self.writable.items():
            options += ["--bind", str(source), target]
        for path in ("/", "/etc", *EMPTY):
            options += ["--remount-ro", path]
        for name, value in {"PATH": f"{PREFIX}/bin:{os.defpath}", **self.environment}.items():
            options += ["--setenv", name, value]
        if filter_descriptor is not None:
            options += ["--seccomp", str(filter_descriptor)]
        return ["bwrap", *options, *words]

    def _system(self) -> Iterator[str]:
        yield from ("--proc", "/proc", "--dev", "/dev", "--ro-bind", "/sys", "/sys", "--tmpfs", "/etc")
        for entry in [*Path("/").iterdir(), *Path("/etc").iterdir()]:
            if str(entry) not in KEPT:
                yield from ("--symlink", os.readlink(entry), str(entry)) if entry.is_symlink() else ("--ro-bind", str(entry), str(entry))
        yield from ("--ro-bind", str(USERS / "passwd"), "/etc/passwd", "--ro-bind", str(USERS / "group"), "/etc/group")
        for path in (*EMPTY, str(ROOT)):  # the checkout as well: what is installed must not need it
            yield from ("--tmpfs", path)
        yield from ("--ro-bind", sys.base_prefix, sys.base_prefix, "--ro-bind", site_packages(), DEPENDENCIES)

    def run(self, *words: str) -> str:
        """Its output. Asserts that it succeeds."""
        done = subprocess.run(self.command(words), capture_output=True, text=True, timeout=START_SECONDS, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    @contextmanager
    def server(self, words: Sequence[str], cwd: str) -> Iterator["Server"]:
        """Once it answers."""
        with (self.seccomp or Path(os.devnull)).open("rb") as filter_file:
            descriptor = filter_file.fileno() if self.seccomp is not None else None
            process = subprocess.Popen(
                self.command(words, cwd, descriptor),
                pass_fds=() if descriptor is None else (descriptor,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert " serves " in line, f"{process.communicate()[1]} (ended with {process.returncode})"
            yield Server(process, f"http://{line.split('http://')[1].split('/v1')[0]}", line)
        finally:
            process.kill()
            process.communicate()


@dataclass(frozen=True)
class Server:
    process: "subprocess.Popen[str]"
    url: str
    start_line: str

    def get(self, path: str, key: str = "") -> int:
        """The status."""
        request = urllib.request.Request(self.url.replace("0.0.0.0", "127.0.0.1") + path, headers={"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def end(self, number: int) -> tuple[int, str]:
        """Sends the server a signal; its exit code and log."""
        (server,) = psutil.Process(self.process.pid).children()
        server.send_signal(number)
        _, log = self.process.communicate(timeout=60)
        return self.process.returncode, log


def site_packages() -> str:
    """Where the dependencies are that these tests run with."""
    return str(Path(psutil.__file__).parents[1])


def install(wheel: Path, prefix: Path) -> None:
    """Into a new virtual environment at `PREFIX`, with the dependencies that are here."""
    scratch = prefix.with_name("scratch")
    scratch.mkdir()
    there = Confinement({"/srv": wheel.parent}, {PREFIX: prefix, "/tmp": scratch})
    there.run(f"{sys.base_prefix}/bin/python3", "-m", "venv", "--without-pip", PREFIX)
    library = sysconfig.get_path("purelib", vars={"base": PREFIX, "platbase": PREFIX})
    there.run(f"{PREFIX}/bin/python", "-c", f"open({library!r} + '/dependencies.pth', 'w').write({DEPENDENCIES!r})")
    there.run(f"{PREFIX}/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", f"/srv/{wheel.name}")
