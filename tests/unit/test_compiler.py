"""The kernel cache with a stand-in for the compiler: what is served, what is compiled again, what is said."""

from __future__ import annotations

import ast
import dataclasses
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashhopper import compiler, disk_cache, kernel_binary, toolchain
from flashhopper.compiler import KernelCache, kernel_key, kernel_sources, source_digest
from flashhopper.config import ForwardConfig, KernelSpec
from flashhopper.disk_cache import DiskCache, cache_dir
from flashhopper.toolchain import Toolchain, current_toolchain

SPEC = KernelSpec("bfloat16", 128, 128, True, ForwardConfig(128, 128))
OTHER = KernelSpec("bfloat16", 64, 64, True, ForwardConfig(128, 128))
TOOLCHAIN = Toolchain(dsl="4.8.1", tvm_ffi="0.1.15", cuda="cu12", host="x86-64-v2")
SOURCES = "digest of the sources"


class StandIn:
    """A compiler whose object files say what they are, and a loader that runs nothing."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.loaded: list[Path] = []
        self.unloadable: tuple[str, ...] = ()

    def cache(self) -> KernelCache:
        return KernelCache(self.compile, self.export, self.load)

    def compile(self, spec: KernelSpec) -> Callable[[], str]:
        self.compiled.append(spec.name)
        return lambda: "compiled"

    def export(self, compiled: object, name: str, host: str) -> bytes:
        return f"object of {name} for {host}".encode()

    def load(self, path: Path, name: str) -> Callable[[], str]:
        if path.suffix in self.unloadable:
            raise OSError(f"{path.suffix} cannot be loaded")
        assert name.encode() in path.read_bytes()
        self.loaded.append(path)
        return lambda: f"loaded {path.suffix}"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "kernels"
    monkeypatch.setenv("FLASHHOPPER_CACHE_DIR", str(directory))
    monkeypatch.setattr(compiler, "current_toolchain", lambda: TOOLCHAIN)
    monkeypatch.setattr(kernel_binary, "_LINKERS", ())
    monkeypatch.setattr(compiler, "source_digest", lambda: SOURCES)  # the real ones may be edited while tests run
    monkeypatch.setattr(compiler, "_sources", lambda: SOURCES)
    monkeypatch.setattr(disk_cache, "_warned", set())
    return directory


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture
def linker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "link_shared", lambda path: b"linked " + path.read_bytes())


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def test_one_process_compiles_and_the_next_loads(stand_in: StandIn, directory: Path) -> None:
    assert stand_in.cache().get(SPEC)() == "loaded .o"
    (name,) = files(directory)
    assert name.startswith(f"{SPEC.name}-{kernel_key(SPEC, TOOLCHAIN, SOURCES)[:16]}-")
    assert name.endswith(".o")
    assert stand_in.cache().get(SPEC)() == "loaded .o"
    assert stand_in.compiled == [SPEC.name]


def test_memory_serves_the_second_call(stand_in: StandIn) -> None:
    cache = stand_in.cache()
    assert cache.get(SPEC) is cache.get(dataclasses.replace(SPEC))
    assert len(stand_in.loaded) == 1


def test_every_field_of_the_spec_makes_another_kernel() -> None:
    config = SPEC.config
    changed = [
        dataclasses.replace(SPEC, causal=False),
        dataclasses.replace(SPEC, head_dim=64),
        dataclasses.replace(SPEC, config=dataclasses.replace(config, softmax="exact")),
        dataclasses.replace(SPEC, config=dataclasses.replace(config, scheduler="static")),
    ]
    keys = {kernel_key(spec, TOOLCHAIN, "sources") for spec in [SPEC, *changed]}
    assert len(keys) == 5


@pytest.mark.usefixtures("linker")
def test_linked_library_is_preferred(stand_in: StandIn, directory: Path) -> None:
    assert stand_in.cache().get(SPEC)() == "loaded .so"
    assert sorted(Path(name).suffix for name in files(directory)) == [".o", ".so"]
    assert stand_in.cache().get(SPEC)() == "loaded .so"
    assert stand_in.compiled == [SPEC.name]


@pytest.mark.usefixtures("linker")
def test_object_file_serves_where_libraries_cannot_be_loaded(stand_in: StandIn) -> None:
    stand_in.unloadable = (".so",)
    assert stand_in.cache().get(SPEC)() == "loaded .o"
    assert stand_in.cache().get(SPEC)() == "loaded .o"
    assert stand_in.compiled == [SPEC.name]


@pytest.mark.parametrize(
    "content", [b"", b"object", b"object of another kernel"], ids=["empty", "truncated", "changed"]
)
def test_damaged_file_is_deleted_and_compiled_again(
    content: bytes, stand_in: StandIn, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.cache().get(SPEC)
    (name,) = files(directory)
    (directory / name).write_bytes(content)
    assert stand_in.cache().get(SPEC)() == "loaded .o"
    assert stand_in.compiled == [SPEC.name] * 2
    assert files(directory) == [name]
    assert "does not match its name" in caplog.text


@pytest.mark.usefixtures("linker")
def test_damaged_library_is_linked_again_not_compiled(stand_in: StandIn, directory: Path) -> None:
    stand_in.cache().get(SPEC)
    before = files(directory)
    library = next(directory.glob("*.so"))
    library.write_bytes(library.read_bytes()[:-1])
    assert stand_in.cache().get(SPEC)() == "loaded .so"
    assert files(directory) == before
    assert stand_in.compiled == [SPEC.name]


def test_file_that_cannot_be_loaded_is_replaced(stand_in: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    stand_in.cache().get(SPEC)
    stand_in.unloadable = (".o",)
    assert stand_in.cache().get(SPEC)() == "compiled"
    assert "it cannot be loaded: .o cannot be loaded" in caplog.text


def test_broken_installation_does_not_cost_the_cache(stand_in: StandIn, directory: Path) -> None:
    stand_in.cache().get(SPEC)

    def load(path: Path, name: str) -> Callable[[], str]:
        raise ImportError("cutlass is broken")

    with pytest.raises(ImportError, match="cutlass is broken"):
        KernelCache(stand_in.compile, stand_in.export, load).get(SPEC)
    assert len(files(directory)) == 1


def fail(*_args: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("operation", ["replace", "write", "export"])
def test_full_or_read_only_disk_warns_once_and_keeps_kernels_in_memory(
    operation: str,
    stand_in: StandIn,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if operation == "replace":
        monkeypatch.setattr(os, "replace", fail)
    elif operation == "write":
        monkeypatch.setattr(Path, "write_bytes", fail)
    else:
        monkeypatch.setattr(stand_in, "export", fail)
    cache = stand_in.cache()
    assert cache.get(SPEC)() == "compiled"
    assert cache.get(OTHER)() == "compiled"
    assert cache.get(SPEC)() == "compiled"
    assert stand_in.compiled == [SPEC.name, OTHER.name]
    assert files(directory) == []
    assert [
        record.message.count("No space left") for record in caplog.records if record.levelno >= logging.WARNING
    ] == [1]


def test_cache_directory_that_is_a_file(stand_in: StandIn, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory.write_text("not a directory")
    assert stand_in.cache().get(SPEC)() == "compiled"
    assert caplog.text.count("cannot write to the kernel cache") == 1
    assert directory.read_text() == "not a directory"
    with pytest.raises(OSError, match="not stored"):
        stand_in.cache().warm(OTHER)


def test_read_only_cache_serves_object_files_without_a_word(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.cache().get(SPEC)
    caplog.clear()
    monkeypatch.setattr(compiler, "link_shared", lambda path: pytest.fail("nowhere to put the library"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert stand_in.cache().get(SPEC)() == "loaded .o"
    assert caplog.text == ""


def test_changed_source_is_compiled_again(
    stand_in: StandIn, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.cache().get(SPEC)
    package = copy_package(tmp_path)
    (package / "kernels" / "mask.py").write_text("changed = True\n")
    monkeypatch.setattr(compiler, "source_digest", lambda: source_digest(package))
    monkeypatch.setattr(compiler, "_sources", lambda: source_digest(package))
    assert not compiler.is_cached(SPEC)
    stand_in.cache().get(SPEC)
    assert stand_in.compiled == [SPEC.name] * 2
    assert len(files(directory)) == 2


def copy_package(tmp_path: Path) -> Path:
    package = tmp_path / "flashhopper"
    shutil.copytree(Path(compiler.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


@pytest.mark.parametrize("path", ["config/forward.py", "programs.py", "slopes.py", "kernels/mask.py", "kernels/new.py"])
def test_source_digest_sees_each_source(path: str, tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    before = source_digest(package)
    with (package / path).open("a") as file:
        file.write("\n")
    assert source_digest(package) != before


# What toolchain.py decides is in the key by itself, as a Toolchain.
IN_THE_KEY_ITSELF = {"toolchain.py"}


def imported_files(path: Path, package: Path) -> set[Path]:
    """The package's files that a module imports, at its top or in a function; of ``from a import b`` also b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not looked at here"
            assert node.module is not None
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    files: set[Path] = set()
    for name in names:
        first, *rest = name.split(".")
        if first == package.name and rest:
            places = package.joinpath(*rest).with_suffix(".py"), package.joinpath(*rest, "__init__.py")
            files.update(place for place in places if place.exists())
    return files


def outside_the_digest(package: Path) -> set[str]:
    """What the sources in the digest import, but for what is in it."""
    sources = kernel_sources(package)
    found = set().union(*(imported_files(path, package) for path in sources))
    return {path.relative_to(package).as_posix() for path in found.difference(sources)} - IN_THE_KEY_ITSELF


def test_source_digest_has_all_that_kernels_and_specs_import() -> None:
    package = Path(compiler.__file__).parent
    assert outside_the_digest(package) == set()
    imported = imported_files(package / "kernels" / "softmax.py", package)
    assert {package / "kernels" / "ptx.py", package / "config" / "__init__.py"} <= imported


@pytest.mark.parametrize(
    "line, file",
    [
        ("from flashhopper import problem", "problem.py"),
        ("from flashhopper.reference import attention", "reference.py"),
        ("def late():\n    import flashhopper.bench.grid", "bench/grid.py"),
    ],
)
@pytest.mark.parametrize("path", ["config/forward.py", "kernels/mask.py", "slopes.py"])
def test_an_import_from_outside_the_digest_is_found(path: str, line: str, file: str, tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    with (package / path).open("a") as source:
        source.write(f"{line}\n")
    assert outside_the_digest(package) == {file}


def test_source_digest_sees_a_move_between_files(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    before = source_digest(package)
    (package / "kernels" / "mask.py").rename(package / "kernels" / "renamed.py")
    assert source_digest(package) != before


def test_sources_edited_while_running_are_not_cached(
    stand_in: StandIn, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "source_digest", lambda: "edited since")
    assert stand_in.cache().get(SPEC)() == "compiled"
    assert files(directory) == []
    assert f"{SPEC.name} is not cached" in caplog.text


@pytest.mark.parametrize(
    "change",
    [{"dsl": "4.8.2"}, {"tvm_ffi": "0.1.16"}, {"cuda": "cu13"}, {"host": "aarch64"}, {"settings": ("CUTE_DSL_X=1",)}],
    ids=lambda change: next(iter(change)),
)
def test_changed_toolchain_is_compiled_again(
    change: dict[str, Any], stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.cache().get(SPEC)
    monkeypatch.setattr(compiler, "current_toolchain", lambda: dataclasses.replace(TOOLCHAIN, **change))
    stand_in.cache().get(SPEC)
    assert stand_in.compiled == [SPEC.name] * 2


def test_key_does_not_depend_on_python(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel_key(SPEC, current_toolchain(), "sources")
    monkeypatch.setattr(sys, "version", "3.99.0")
    monkeypatch.setattr(sys, "version_info", (3, 99, 0, "final", 0))
    monkeypatch.setattr(sys, "hexversion", 0x03630000)
    assert kernel_key(SPEC, current_toolchain(), "sources") == before


def test_threads_compile_a_spec_once() -> None:
    stand_in = StandIn()
    original = stand_in.compile

    def slowly(spec: KernelSpec) -> Callable[[], str]:
        time.sleep(0.05)
        return original(spec)

    cache = KernelCache(slowly, stand_in.export, stand_in.load)
    start = threading.Barrier(8)
    results: list[object] = []

    def ask(spec: KernelSpec) -> None:
        start.wait()
        results.append(cache.get(spec))

    threads = [threading.Thread(target=ask, args=(spec,)) for spec in [SPEC, OTHER] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(stand_in.compiled) == sorted([SPEC.name, OTHER.name])
    assert len(results) == 8
    assert len(set(map(id, results))) == 2


def test_failed_compilation_is_raised_and_tried_again(stand_in: StandIn) -> None:
    attempts: list[str] = []

    def compile_function(spec: KernelSpec) -> Callable[[], str]:
        attempts.append(spec.name)
        if len(attempts) == 1:
            raise RuntimeError("ptxas failed")
        return stand_in.compile(spec)

    cache = KernelCache(compile_function, stand_in.export, stand_in.load)
    with pytest.raises(RuntimeError, match="ptxas failed"):
        cache.get(SPEC)
    assert cache.get(SPEC)() == "loaded .o"


def test_warm_compiles_into_the_disk_cache_only_what_is_missing(stand_in: StandIn) -> None:
    assert not compiler.is_cached(SPEC)
    assert stand_in.cache().warm(SPEC)
    assert compiler.is_cached(SPEC)
    assert not stand_in.cache().warm(SPEC)
    assert stand_in.compiled == [SPEC.name]
    assert stand_in.loaded == []


def test_no_home_directory_means_memory_only(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHHOPPER_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert stand_in.cache().get(SPEC)() == "compiled"
    assert DiskCache(cache_dir()).problem() is not None


@pytest.mark.parametrize("missing", ["nvidia-cutlass-dsl", "apache-tvm-ffi"])
def test_missing_package_is_named_with_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = toolchain.package_version
    monkeypatch.setattr(toolchain, "package_version", lambda name: None if name == missing else installed(name))
    monkeypatch.setattr(compiler, "current_toolchain", current_toolchain)
    with pytest.raises(ImportError, match=f"need {missing}, which is not installed: run `pip install flashhopper`"):
        compiler.get_kernel(SPEC)
