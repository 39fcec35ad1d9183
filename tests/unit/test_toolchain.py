"""Where kernels are kept and what they are compiled with, as found on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flashhopper import toolchain
from flashhopper.disk_cache import cache_dir
from flashhopper.toolchain import current_toolchain


def test_cache_dir_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLASHHOPPER_CACHE_DIR", "~/kernels")
    assert cache_dir() == tmp_path / "kernels"
    monkeypatch.delenv("FLASHHOPPER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "flashhopper"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "flashhopper"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / ".cache" / "flashhopper"


@pytest.mark.parametrize("driver, expected", [(None, "cu13"), ((13, 1), "cu13"), ((12, 8), "cu12"), ((11, 8), None)])
def test_runtime_library_is_the_newest_that_the_driver_supports(
    driver: tuple[int, int] | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flavour in ("cu12", "cu13", "cu9x"):
        library = tmp_path / "nvidia_cutlass_dsl" / flavour / "lib" / toolchain.RUNTIME_LIBRARY
        library.parent.mkdir(parents=True)
        library.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(toolchain, "driver_cuda_version", lambda: driver)
    found = toolchain.runtime_library()
    assert (found.parent.parent.name if found else None) == expected


def test_settings_that_change_the_code_are_part_of_the_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = current_toolchain()
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", "somewhere")
    assert current_toolchain() == plain
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert current_toolchain().settings == (*plain.settings, "CUTE_DSL_LINEINFO=1")
