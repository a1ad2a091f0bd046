"""Kernels without a GPU: run by Triton's interpreter, or compiled for GPUs that are not here."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_LIMIT = 99 * 1024
"""Of a block on consumer GPUs of Ada and Blackwell."""


def resources(
    kernel: object, constants: Mapping[str, object], pointers: Mapping[str, str], capability: int, warps: int
) -> dict[str, int]:
    """`usage` of a kernel, compiled as by `ahead_of_time`."""
    return usage(ahead_of_time(kernel, constants, pointers, capability, warps))


def ahead_of_time(
    kernel: object,
    constants: Mapping[str, object],
    pointers: Mapping[str, str],
    capability: int,
    warps: int,
    **options: object,
) -> Any:
    """The arguments that are neither constants nor in `pointers` are int32; pointers and sizes named N, K, half or
    ..._step, ..._stride are multiples of 16."""
    names: list[str] = kernel.arg_names  # type: ignore[attr-defined]
    kinds = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if kinds[name] != "constexpr"
        and (kinds[name].startswith("*") or name in ("N", "K", "half") or name.endswith(("_step", "_stride")))
    }
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=fixed, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps, **options})


def usage(compiled: Any) -> dict[str, int]:
    """Registers (REG), bytes of STACK, of LOCAL and of SHARED memory."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    return {**found, "SHARED": compiled.metadata.shared}


def run_interpreted(module: str, *arguments: str) -> None:
    """`module` as a program with these arguments, which says "all right" when it is: a process of its own, since
    TRITON_INTERPRET is read when kernels are defined."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "all right\n"), done.stderr[-2000:]
