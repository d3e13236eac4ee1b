"""The house rules that a machine can hold: what may be imported, from which floor, and that the README's code runs."""

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import densegrpo_jax

ROOT = Path(densegrpo_jax.__file__).parent
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(ROOT)], "densegrpo_jax."))

FLOORS = [  # from the ground up; the first prefix that fits decides
    (1, ("flow", "credit", "objective", "models.source", "models.component_json")),
    (2, ("models", "families", "pipeline", "parallel", "config")),
    (5, ("cli", "scenes.pretrain")),
    (3, ("rewards", "scenes", "prompts", "policy")),
    (4, ("train", "evaluate", "calibrate", "plan", "sample", "export")),
]

TORCH = ("densegrpo_jax.rewards.detection",)  # loaded by reward servers only, and importing it does not import torch


def floor(module: str) -> int:
    name = module.removeprefix("densegrpo_jax.")
    for level, prefixes in FLOORS:
        if any(name == p or name.startswith(p + ".") for p in prefixes):
            return level
    raise AssertionError(f"{module} stands on no floor: give it one here")


def imports(module: str) -> set[str]:
    path = ROOT.parent / (module.replace(".", "/") + ".py")
    path = path if path.exists() else path.with_suffix("") / "__init__.py"
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_module_imports_without_torch_and_diffusers():
    code = (
        "import importlib, sys\n"
        f"for name in {MODULES!r}: importlib.import_module(name)\n"
        "bad = {'torch', 'diffusers', 'transformers', 'tensorflow'} & set(sys.modules)\n"
        "sys.exit(f'imported at run time: {bad}' if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error::DeprecationWarning:densegrpo_jax", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("module", MODULES)
def test_floors_import_downwards_only(module):
    for name in imports(module) & set(MODULES):
        assert floor(name) <= floor(module), f"{module} (floor {floor(module)}) imports {name} (floor {floor(name)})"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_unsafe_and_nothing_for_tests_only(module):
    names = imports(module)
    allowed = {"torch"} if module in TORCH else set()
    assert not names & ({"torch", "diffusers", "peft", "pickle", "dill", "marshal", "shelve"} - allowed)
    path = ROOT.parent / (module.replace(".", "/") + ".py")
    path = path if path.exists() else path.with_suffix("") / "__init__.py"
    calls = {n.func.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not calls & {"eval", "exec", "compile"}


def test_floor_one_knows_no_network_and_no_config():
    for module in (m for m in MODULES if m.split(".")[1] in ("flow", "credit", "objective")):
        ours = {name for name in imports(module) if name.startswith("densegrpo_jax")}
        assert all(name.split(".")[1] in ("flow", "credit", "objective") for name in ours if "." in name), module


def test_the_readmes_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT.parent / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
