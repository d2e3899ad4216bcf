"""Code and weights are loaded from nowhere that another user of the machine could have written."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.engine.errors import ConfigurationError
from penstock.engine.model.compiled_layers import LayerCompilation
from penstock.engine.model.loader import in_memory
from penstock.engine.native import runtime as native
from penstock.engine.system import cache as caching
from penstock.engine.system.cache import (
    COMPILER_CACHES,
    TRUST,
    build_once,
    check_data,
    check_private,
    make_data_directory,
    make_private,
    redirect_compiler_caches,
)
from penstock.plugins.grammars.outlines_core.backend import to_pattern
from penstock.plugins.grammars.regex.tree import Literal
from tests.tiny_models import tiny_model

ANOTHER_USER = 12345
needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="there is no C++ compiler here")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache will be: neither it nor the directory above exists."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "home" / "cache"))
    return tmp_path / "home" / "cache"


@pytest.fixture
def wide_open() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def kernels(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A library in the cache, of a source that compiles in no time."""
    (tmp_path / "tiny.cpp").write_text("")
    monkeypatch.setattr(native, "SOURCE", tmp_path / "tiny.cpp")
    native.native_library.cache_clear()
    yield native._build(native.find_compiler() or "")
    native.native_library.cache_clear()


def permissions(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("wide_open")
def test_what_the_cache_holds_is_the_users_alone_whatever_the_umask(cache: Path) -> None:
    build_once(cache / "models" / "one", lambda scratch: (scratch / "weights").touch())
    assert [permissions(path) for path in (cache.parent, cache, cache / "models", cache / "models" / "one")] == [0o700] * 4
    check_private(cache / "models" / "one" / "weights")


@needs_compiler
@pytest.mark.usefixtures("wide_open")
def test_built_kernels_are_the_users_alone_whatever_the_umask(kernels: Path) -> None:
    assert permissions(kernels) & 0o022 == 0


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
@pytest.mark.parametrize("depth", range(3))
def test_a_place_that_others_can_write_is_refused_by_name(cache: Path, mode: int, depth: int) -> None:
    places = [cache, cache / "native", cache / "native" / "deep"]
    make_private(places[-1])
    places[depth].chmod(mode)
    with pytest.raises(ConfigurationError, match=f"{places[depth]} can be written by other users.*chmod.*PENSTOCK_CACHE"):
        check_private(places[-1] / "kernels.so")


def test_a_place_of_another_user_is_refused_unless_that_is_the_administrator(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_private(cache / "native")
    cache.chmod(0o755)
    owner = cache.stat().st_uid
    monkeypatch.setattr("penstock.engine.system.cache.ROOT_USER", owner)
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER_USER)
    check_private(cache / "native")
    monkeypatch.setattr("penstock.engine.system.cache.ROOT_USER", owner + 1)
    with pytest.raises(ConfigurationError, match=r"belongs to another user.*PENSTOCK_CACHE"):
        check_private(cache / "native")


@pytest.mark.parametrize(("mode", "is_refused"), [(0o777, True), (0o775, True), (0o770, True), (0o1777, False), (0o755, False)])
def test_a_cache_that_others_could_replace_is_refused(
    cache: Path, tmp_path: Path, mode: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By writing in a directory above it, where no sticky bit keeps them from renaming what is not theirs."""
    monkeypatch.setattr(caching, "_is_own_group", lambda group_id: False)
    make_private(cache / "native")
    tmp_path.chmod(mode)
    if not is_refused:
        check_private(cache / "native")
        check_data(cache / "store.sqlite", "--response-store")
        return
    remedy = f"{cache} lies in {tmp_path}, which can be written by other users, .*run `chmod go-w {tmp_path}`.*PENSTOCK_CACHE"
    with pytest.raises(ConfigurationError, match=remedy):
        check_private(cache / "native")
    for flag in ("--kv-cache-dir", "--files-dir"):
        with pytest.raises(ConfigurationError, match=f"{flag} {cache} lies in {tmp_path}"):
            make_data_directory(cache, flag)
    with pytest.raises(ConfigurationError, match="--response-store"):
        check_data(cache / "store.sqlite", "--response-store")


def test_a_cache_below_another_users_directory_is_refused_also_behind_a_link(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "theirs" / "cache"
    make_private(real)
    cache.parent.mkdir()
    cache.symlink_to(real)
    check_private(cache / "kernels.so")
    (tmp_path / "theirs").chmod(0o777)
    with pytest.raises(ConfigurationError, match=f"lies in {tmp_path / 'theirs'}, which can be written"):
        check_private(cache / "kernels.so")
    (tmp_path / "theirs").chmod(0o755)
    monkeypatch.setattr(caching, "ROOT_USER", cache.stat().st_uid + 1)
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER_USER)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        check_private(cache / "kernels.so")


def test_a_group_of_the_user_alone_may_write_above_the_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import pwd

    make_private(cache)
    tmp_path.chmod(0o775)
    own, group_id = pwd.getpwuid(os.geteuid()), tmp_path.stat().st_gid
    monkeypatch.setattr(pwd, "getpwuid", lambda user_id: pwd.struct_passwd((own.pw_name, "x", own.pw_uid, group_id, "", "", "")))
    for members, is_accepted in (([], True), ([own.pw_name], True), (["another"], False)):
        monkeypatch.setattr(grp, "getgrgid", lambda number, names=members: grp.struct_group((own.pw_name, "x", number, names)))
        if is_accepted:
            check_private(cache)
        else:
            with pytest.raises(ConfigurationError, match="can be written by other users"):
                check_private(cache)


def test_nothing_is_checked_where_the_operator_says_so(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_private(cache / "native")
    for place in (tmp_path, cache, cache / "native"):
        place.chmod(0o2777)
    with pytest.raises(ConfigurationError, match=f"{TRUST}=1 skips this check"):
        check_private(cache / "native")
    monkeypatch.setenv(TRUST, "1")
    check_private(cache / "native")
    make_data_directory(cache, "--kv-cache-dir")


@needs_compiler
def test_kernels_that_others_can_write_are_not_loaded(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.chmod(0o666)
    monkeypatch.setattr(ctypes, "CDLL", None)  # would raise if it were called
    with pytest.raises(ConfigurationError, match=str(kernels)):
        native.native_library()


def test_compiled_layers_that_others_can_write_are_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compilation = LayerCompilation(in_memory(tiny_model("llama"), max_model_len=128))  # no kernels are built for it in the new cache
    (package,) = [compilation._package(kind) for kind in compilation._kinds]
    make_private(package.parent)
    package.touch(0o666)
    package.chmod(0o666)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", None)
    with pytest.raises(ConfigurationError, match=str(package)):
        compilation.install()


def test_compiler_caches_are_where_the_user_says_else_in_ours(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in COMPILER_CACHES:
        monkeypatch.setenv(variable, "mine")  # which has it restored after the test
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    redirect_compiler_caches()
    assert os.environ["TRITON_CACHE_DIR"] == "mine"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache / "torchinductor")
    assert permissions(cache / "torchinductor") == 0o700
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (cache / "torchinductor").chmod(0o777)
    with pytest.raises(ConfigurationError, match="torchinductor can be written by other users"):
        redirect_compiler_caches()


@pytest.mark.thorough  # imports Inductor in another process; by default it is seen that the variables are set
@needs_compiler
def test_torch_neither_reads_nor_writes_the_directory_that_any_user_can_make_first(cache: Path, tmp_path: Path) -> None:
    planted = tmp_path / "tmp" / "torchinductor_user"
    planted.mkdir(parents=True)
    script = (
        "from penstock.engine.system.cache import redirect_compiler_caches as redirect; redirect();"
        "import torch._inductor.cpu_vec_isa as isa; isa.VecISA._avx_code = 'int trial;'; isa.pick_vec_isa()"  # which compiles in no time
    )
    environment = {name: value for name, value in os.environ.items() if name not in COMPILER_CACHES}
    environment |= {"TMPDIR": str(planted.parent), "USER": "user", "LOGNAME": "user"}
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, check=True, timeout=120)
    assert list(planted.rglob("*")) == []
    assert list((cache / "torchinductor").rglob("*.so"))


def test_outlines_opens_no_cache_of_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dependency diskcache unpickles what a database holds that others may have written (CVE-2025-69872)."""
    monkeypatch.setenv("OUTLINES_CACHE_DIR", str(tmp_path / "outlines"))
    monkeypatch.setattr("diskcache.Cache.__init__", None)  # would raise if it were called
    assert to_pattern(Literal("a")) == "a"
    assert not (tmp_path / "outlines").exists()
