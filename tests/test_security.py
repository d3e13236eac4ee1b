"""No code from data: a scan of the sources. Where else it is held: docs/reliability.md."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCANNED = ("densegrpo_jax", "configs", "tools", "benchmarks", "launch", "examples")
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {"system", "popen", "exec_module", "load_module", "run_module", "run_path", "extractall", "mktemp", "literal_eval"}
ALLOWED = {
    ("tools/convert_scorer.py", "pickle"),  # a restricted unpickler, tested in tests/tools/test_convert_scorer.py
    ("densegrpo_jax/cli.py", "exec_module"),  # the config file that the user names is a program, as documented
    ("densegrpo_jax/rewards/server.py", "exec_module"),  # and so is the reward file
}


def unsafe(source: str) -> list[tuple[int, str]]:
    """(line, what) of the calls and imports in a Python source that could run what data says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [(node.lineno, root) for root in (name.partition(".")[0] for name in names) if root in MODULES]
        if not isinstance(node, ast.Call):
            continue
        given = {k.arg: k.value.value if isinstance(k.value, ast.Constant) else ... for k in node.keywords}
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        owner = node.func.value.id if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) else ""
        if name in METHODS or (isinstance(node.func, ast.Name) and name in CALLS):
            found.append((node.lineno, name))
        if given.get("shell", False) is not False:
            found.append((node.lineno, "shell"))
        if given.get("trust_remote_code", False) is not False:
            found.append((node.lineno, "trust_remote_code"))
        if owner == "torch" and name == "load" and given.get("weights_only") is not True:
            found.append((node.lineno, "torch.load"))
        if owner in ("np", "numpy") and name == "load" and given.get("allow_pickle") is not False:
            found.append((node.lineno, "np.load"))
    return found


def test_no_source_runs_what_data_says():
    found, used = [], set()
    for path in (p for folder in SCANNED for p in sorted((ROOT / folder).rglob("*.py"))):
        name = path.relative_to(ROOT).as_posix()
        for line, what in unsafe(path.read_text()):
            used.add((name, what))
            if (name, what) not in ALLOWED:
                found.append(f"{name}:{line}: {what}")
    assert not found, "\n".join(found)
    assert ALLOWED <= used  # an exception that is no longer needed goes


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("import yaml", "yaml"),
        ("import numpy, dill.source", "dill"),
        ("eval('1')", "eval"),
        ("exec(text)", "exec"),
        ("__import__(name)", "__import__"),
        ("os.system(command)", "system"),
        ("subprocess.run(command, shell=True)", "shell"),
        ("subprocess.run(command, shell=chosen)", "shell"),
        ("torch.load(path)", "torch.load"),
        ("torch.load(path, weights_only=False)", "torch.load"),
        ("np.load(path)", "np.load"),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", "trust_remote_code"),
        ("spec.loader.exec_module(module)", "exec_module"),
        ("archive.extractall(folder)", "extractall"),
    ],
)
def test_the_scan_sees(source, what):
    assert what in [found for _, found in unsafe(source)]


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "re.compile(x)", "jitted.lower(x).compile()", "torch.load(x, weights_only=True)", "np.load(x, allow_pickle=False)"],
)
def test_the_scan_lets_pass(source):
    assert not unsafe(source)


def test_scripts_evaluate_no_strings():
    for path in sorted((ROOT / "launch").glob("*.sh")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not re.search(r"(^|[;&|]|\bthen\b|\bdo\b)\s*eval\b", line.partition("#")[0]), f"{path.name}:{number}: eval"
