"""What the project promises about itself: size budget, exports, light imports, a README that does not rot."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import langchain_safe_llm
import llama_index.llms.safe_llm
import safe_llm

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*(ROOT / "safe_llm").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")])
MODULES = sorted(
    name
    for package in (safe_llm, langchain_safe_llm, llama_index.llms.safe_llm)
    for _, name, _ in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if not name.endswith("__main__")
)


def functions(path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in ast.walk(tree) if isinstance(node, kinds)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_size_budget_of_files_and_functions(path):
    assert path.read_text(encoding="utf-8").count("\n") <= 400
    assert [(name, lines) for name, lines in functions(path) if lines > 60] == []


def test_size_budget_of_the_median_function():
    lengths = [lines for path in SOURCES for _, lines in functions(path)]
    assert statistics.median(lengths) < 15


@pytest.mark.parametrize("name", MODULES)
def test_all_names_what_exists(name):
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert all(hasattr(module, item) for item in exported)
    assert len(set(exported)) == len(exported)


def test_everything_exported_at_the_top_resolves():
    for name in safe_llm.__all__:
        assert getattr(safe_llm, name) is not None
    with pytest.raises(AttributeError, match="Ensembel"):
        _ = safe_llm.Ensembel


@pytest.mark.parametrize(
    "module",
    [
        "safe_llm",
        "safe_llm.cli",
        "safe_llm.errors",
        "safe_llm.config",
        "safe_llm.models",
        "safe_llm.sharing",
        "safe_llm.trace",
        "safe_llm.report",
        "langchain_safe_llm",
        "llama_index.llms.safe_llm",
    ],
)
def test_import_is_light(module):
    code = f"import {module}, sys; print(*[m for m in ('torch', 'transformers', 'accelerate') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []


def test_every_module_and_public_class_has_a_docstring():
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body:
            assert ast.get_docstring(tree), path


def test_engine_does_not_import_what_lies_above_it():
    text = (ROOT / "safe_llm" / "engine.py").read_text(encoding="utf-8")
    assert not re.search(r"trace|report|ensemble import|cli", text.split('"""')[2])


def test_nothing_is_revived_from_langchains_serialization():
    # G09: keys named "lc" in what a model wrote are revived by `load` and `loads` only
    for path in (ROOT / "integrations").rglob("*.py"):
        assert not re.search(r"langchain_core\.load|langchain_core import load", path.read_text(encoding="utf-8")), path


def test_readme_commands_are_what_ci_runs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("main", "tests"):
        blocks = re.findall(rf"<!-- command: {name} -->\n```bash\n(.+?)\n```", readme, re.DOTALL)
        assert len(blocks) == 1, name
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "readme_command main" in ci
    assert "readme_command tests" in ci


def test_readme_python_example_runs(monkeypatch, capsys):
    from safe_llm.testing import scripted_ensemble

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- example: python -->\n```python\n(.+?)\n```", readme, re.DOTALL)
    question = re.search(r'question = "(.+?)"', code)
    answers = {question[1]: "Natalia sold 24 clips in May, so 72 in all."}
    monkeypatch.setattr(safe_llm, "Ensemble", _from_scripts(scripted_ensemble(answers)), raising=False)
    exec(compile(code, "README.md", "exec"), {})
    assert "72 in all" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["langchain", "llama-index"])
def test_readme_examples_of_the_integrations_run(name, monkeypatch, capsys):
    from safe_llm.ensemble import Ensemble
    from safe_llm.testing import scripted_ensemble

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(rf"<!-- example: {name} -->\n```python\n(.+?)\n```", readme, re.DOTALL)
    said = ("The answer is 72.", "The answer was 72.")
    france = "What is the capital of France?"
    scripts = scripted_ensemble(*[{france: a} if name == "llama-index" else (lambda _, a=a: a) for a in said])
    monkeypatch.setattr(Ensemble, "from_spec", lambda spec, **_: scripts)
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "The answer" in out
    assert re.search(r"points +\d|'ensemble': 0\.", out)


def _from_scripts(ensemble):
    class FromScripts:
        @staticmethod
        def from_preset(name, **options):
            assert name == "demo"
            return ensemble

    return FromScripts
