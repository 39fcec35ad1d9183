"""The kernel cache across processes, each a Python of its own with a stand-in for the compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from flashhopper.compiler import kernel_key
from flashhopper.config import ForwardConfig, KernelSpec
from flashhopper.toolchain import Toolchain

SPEC = KernelSpec("bfloat16", 128, 128, True, ForwardConfig(128, 128))
TOOLCHAIN = Toolchain(dsl="4.8.1", tvm_ffi="0.1.15", cuda="cu12", host="x86-64-v2")


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}


def test_key_is_the_same_in_another_process() -> None:
    code = f"""
from flashhopper.compiler import kernel_key
from flashhopper.config import Features, ForwardConfig, KernelSpec
from flashhopper.toolchain import Toolchain
print(kernel_key({SPEC!r}, {TOOLCHAIN!r}, "sources"))
"""
    other = environment(PYTHONHASHSEED="7")
    answer = subprocess.run([sys.executable, "-c", code], env=other, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == kernel_key(SPEC, TOOLCHAIN, "sources")


PROCESS = """
import os, sys, time
from pathlib import Path
from flashhopper import compiler, kernel_binary
from flashhopper.compiler import KernelCache
from flashhopper.config import Features, ForwardConfig, KernelSpec
kernel_binary._LINKERS = ()
compiler._sources = compiler.source_digest = lambda: "digest"
ready, go = map(Path, sys.argv[1:])
def compile_function(spec):
    ready.touch()
    while not go.exists():
        time.sleep(0.005)
    return lambda: "compiled"
export = lambda compiled, name, host: name.encode() * 10000
load = lambda path, name: lambda: f"loaded {len(path.read_bytes())}"
cache = KernelCache(compile_function, export, load)
spec = KernelSpec("bfloat16", 128, 128, True, ForwardConfig(128, 128))
print(cache.get(spec)())
"""


def test_two_processes_compiling_at_once_both_succeed(tmp_path: Path) -> None:
    directory = tmp_path / "kernels"
    variables = environment(FLASHHOPPER_CACHE_DIR=str(directory))
    go = tmp_path / "go"
    ready = [tmp_path / "ready0", tmp_path / "ready1"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(path), str(go)], env=variables, stdout=subprocess.PIPE, text=True
        )
        for path in ready
    ]
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in ready) and time.monotonic() < deadline:
        time.sleep(0.01)
    go.touch()
    answers = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert answers == [f"loaded {len(SPEC.name) * 10000}"] * 2
    assert len(list(directory.iterdir())) == 1


ANNOUNCE = """
import logging, os, sys
from flashhopper import compiler, kernel_binary
from flashhopper.config import Features, ForwardConfig, KernelSpec
kernel_binary._LINKERS = ()
compiler._sources = compiler.source_digest = lambda: "digest"

def compile_once(case):
    os.environ["FLASHHOPPER_CACHE_DIR"] = os.path.join(sys.argv[1], case)
    print(case, end=": ", file=sys.stderr)
    compiler.KernelCache(lambda spec: print, lambda c, n, h: b"x", lambda p, n: print).get({spec!r})
    print(file=sys.stderr)

logger = logging.getLogger("flashhopper")
compile_once("plain")
logger.setLevel(logging.WARNING)
compile_once("silenced")
logger.setLevel(logging.NOTSET)
logging.basicConfig()
compile_once("program at WARNING")
logging.getLogger().setLevel(logging.INFO)
compile_once("program at INFO")
"""


def test_a_line_on_stderr_unless_logging_says_otherwise(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ANNOUNCE.format(spec=SPEC), str(tmp_path)]
    finished = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    said = dict(line.split(": ", 1) for line in finished.stderr.splitlines() if line)
    compiled = rf"compiled {SPEC.name} in \d+\.\d s \(cached in {re.escape(str(tmp_path))}/"
    assert re.fullmatch(rf"flashhopper: {compiled}plain\)", said["plain"])
    assert said["silenced"] == ""
    assert said["program at WARNING"] == ""
    assert re.fullmatch(rf"INFO:flashhopper:{compiled}program at INFO\)", said["program at INFO"])
