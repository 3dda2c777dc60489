"""Every Triton kernel compiled for GPUs that are not here: the compiler needs none."""

import importlib
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

FP32, INT32 = "*fp32", "*i32"
SIGNATURES = {
    "_sweep_kernel": ({"F": FP32, "B": FP32, "G": FP32, "floor": "fp32", "rank": "i32", "columns": "i32",
                       "n_sweeps": "i32"}, {"BLOCK": 128}),
    "_multiply_kernel": ({"F": FP32, "B": FP32, "G": FP32, "out": FP32, "eps": "fp32", "rank": "i32",
                          "columns": "i32"}, {"BLOCK": 128}),
    "_histogram": ({"codes": "*u8", "rows": INT32, "targets": INT32, "out": INT32, "n_rows": "i32", "n_features": "i32",
                    "n_lanes": "i32", "rows_each": "i32"}, {"CODES": 16, "LANES": 16, "ROWS": 32}),
}  # fmt: skip


def kernels():
    """Every function under ``triton.jit`` in the modules that say so by their name."""
    root = Path(__file__).parents[2] / "kernels"
    for path in sorted(root.rglob("*_triton.py")):
        module = importlib.import_module("auditor.kernels." + ".".join(path.relative_to(root).with_suffix("").parts))
        for name, value in vars(module).items():
            if isinstance(value, (triton.runtime.JITFunction, InterpretedFunction)):
                yield pytest.param(name, value, id=f"{path.stem}.{name}")


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(("name", "kernel"), list(kernels()))
def test_a_kernel_compiles_to_ptx_and_cubin(name, kernel, architecture, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    types, constants = SIGNATURES[name]  # a new kernel brings its signature
    function = kernel if isinstance(kernel, triton.runtime.JITFunction) else triton.runtime.JITFunction(kernel.fn)
    signature = types | dict.fromkeys(constants, "constexpr")
    values = {(len(types) + i,): value for i, value in enumerate(constants.values())}
    source = ASTSource(fn=function, signature=signature, constexprs=values)
    asm = triton.compile(source, target=GPUTarget("cuda", architecture, 32)).asm
    assert f".target sm_{architecture}" in asm["ptx"]
    assert f".entry {name}(" in asm["ptx"]
    assert asm["cubin"][:4] == b"\x7fELF"


def test_all_kernels_are_there():
    assert {p.values[0] for p in kernels()} == set(SIGNATURES)


def test_what_doctor_compiles_is_the_coordinate_pass():
    from auditor.kernels.factorization.coordinate_descent_triton import compiled

    asm = compiled(80)
    assert ".entry _sweep_kernel(" in asm["ptx"]
    assert len(asm["cubin"]) > 1000
