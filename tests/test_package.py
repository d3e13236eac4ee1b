"""The house rules that a machine can hold: what may be imported, from which floor, and that the README's code runs."""

import ast
import os
import pkgutil
import re
import shutil
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
    (4, ("train", "evaluate", "calibrate", "plan", "doctor", "sample", "export")),
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


def test_a_plain_install_finds_its_configs_weights_and_variants(tmp_path):
    """Installed without -e, away from the repository: configs by name, psi files and the shipped models come with the package."""
    source, target = tmp_path / "source", tmp_path / "target"
    root = ROOT.parent
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("densegrpo_jax", "configs"):
        shutil.copytree(root / name, source / name, ignore=ignore)
    for name in ("setup.py", "README.md"):
        shutil.copy(root / name, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", target, source]
    subprocess.run(pip, check=True, capture_output=True)
    code = (
        "import densegrpo_jax, densegrpo_jax_configs\n"
        "from pathlib import Path\n"
        "from densegrpo_jax import cli, policy\n"
        "from densegrpo_jax.train import psi\n"
        f"assert all(m.__file__.startswith({str(target)!r}) for m in (densegrpo_jax, densegrpo_jax_configs)), densegrpo_jax.__file__\n"
        "assert cli.main(['train']) == 0\n"
        "config = cli.load_config('scenes_preference:stepwise')\n"
        "print(policy.folder(config.model.path), psi.find(Path('scenes_preference')))\n"
    )
    env = os.environ | {"PYTHONPATH": str(target), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "scenes_preference " in done.stdout and "tiny_sd3" in done.stdout
    ours = [p for p in (root / "densegrpo_jax").rglob("*") if p.suffix in (".safetensors", ".json", ".npz", ".txt", ".html", ".jsonl")]
    ours += [p for p in (root / "configs").rglob("*") if p.suffix in (".py", ".json")]
    there = {p.relative_to(target).as_posix().replace("densegrpo_jax_configs", "configs") for p in target.rglob("*") if p.is_file()}
    assert not {p.relative_to(root).as_posix() for p in ours} - there
