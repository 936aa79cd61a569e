"""The project's own promises: packaging, exact versions, the Makefile, house rules, README."""

import ast
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import residualquant
from residualquant import cli

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = [p for top in ("residualquant", "kernels", "tests") for p in sorted((ROOT / top).rglob("*.py"))]

ENVIRONMENT_SCHEMA = {
    "type": "object",
    "required": ["name", "channels", "dependencies"],
    "additionalProperties": False,
    "properties": {
        "name": {"const": "residualquant"},
        "channels": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "dependencies": {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "string", "pattern": r"^[a-z0-9_-]+(=[0-9.]+)?$"},  # never a build string
                    {
                        "type": "object",
                        "required": ["pip"],
                        "additionalProperties": False,
                        "properties": {"pip": {"type": "array", "items": {"type": "string"}}},
                    },
                ]
            },
        },
    },
}


def lock_lines():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def tracked_files():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def make(*arguments, **environment):
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- packaging


def test_version_is_written_once():
    assert PYPROJECT["project"]["version"] == residualquant.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == residualquant.__version__


def test_every_package_is_listed():
    tree = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "residualquant").rglob("__init__.py")}
    mapped = set(PYPROJECT["tool"]["setuptools"]["package-dir"])
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == tree | mapped


def test_kernels_do_not_shadow_another_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    import residualquant.kernels

    assert Path(residualquant.kernels.__file__).parent == ROOT / "kernels" / "ops"


def test_wheel_contains_everything(tmp_path):
    source = tmp_path / "source"
    for file in tracked_files():
        target = source / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    run = subprocess.run(build, cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    package_files = (source / "residualquant").rglob("*.*")
    expected = {f"residualquant/{p.relative_to(source / 'residualquant')}" for p in package_files}
    for folder, package in PYPROJECT["tool"]["setuptools"]["package-dir"].items():
        patterns = PYPROJECT["tool"]["setuptools"]["package-data"][folder]
        found = [p for pattern in patterns for p in (source / package).glob(pattern) if p.is_file()]
        expected |= {f"{folder.replace('.', '/')}/{p.relative_to(source / package)}" for p in found}
    assert expected - names == set()
    assert any(name.startswith("residualquant/data/models/") for name in names)
    assert any(name.startswith("residualquant/data/paper/") for name in names)
    assert any(name.startswith("residualquant/notebooks/") for name in names)


def test_import_is_light_and_offline():
    source = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise OSError('network at import')\n"
        "socket.socket.connect = refuse\n"
        "import residualquant, torch\n"
        "heavy = {'transformers', 'vllm', 'triton', 'evalplus', 'math_verify', 'matplotlib', 'pandas', 'papermill',\n"
        "         'datasets', 'huggingface_hub'}\n"
        "print(sorted(heavy & set(sys.modules)), torch.cuda.is_initialized())\n"
    )
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[0] == "[] False"


# ----------------------------------------------------------------------------------------------- exact versions


def test_lock_pins_exact_public_versions():
    assert len(lock_lines()) > 50
    for line in lock_lines():
        assert re.fullmatch(r'[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*( ; python_version == "3.1[123]")?', line), line


def test_lock_satisfies_the_project():
    locked = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lock_lines() if ";" not in line}
    wanted = PYPROJECT["project"]["dependencies"] + PYPROJECT["project"]["optional-dependencies"]["dev"]
    for requirement in map(Requirement, wanted):
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} but {version} is locked"


def test_conda_environment_has_the_locked_versions():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    jsonschema.validate(environment, ENVIRONMENT_SCHEMA)
    plain = [d for d in environment["dependencies"] if isinstance(d, str)]
    assert "pip" in plain
    python = next(d for d in plain if d.startswith("python="))
    assert Requirement(f"python{PYPROJECT['project']['requires-python']}").specifier.contains(python[7:])
    assert environment["dependencies"][-1]["pip"] == lock_lines()


# ----------------------------------------------------------------------------------------------------- Makefile


def phony_targets():
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    return re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()


def test_make_alone_lists_every_target():
    shown = make().stdout
    for target in phony_targets():
        assert re.search(rf"^  {target} +\S", shown, re.MULTILINE), target


def test_an_active_conda_environment_is_used_unless_it_is_base(tmp_path):
    assert f"environment: {tmp_path};" in make(CONDA_DEFAULT_ENV="rq", CONDA_PREFIX=str(tmp_path)).stdout
    assert "environment: .venv;" in make(CONDA_DEFAULT_ENV="base", CONDA_PREFIX=str(tmp_path)).stdout


def test_an_old_python_is_named_in_one_sentence(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements.lock", "pyproject.toml"):
        (tmp_path / name).touch()
    old = tmp_path / "bin" / "python3"
    old.parent.mkdir()
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    run = subprocess.run(
        [shutil.which("make"), "--no-print-directory", "test"],
        cwd=tmp_path, env={"PATH": str(old.parent)}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode != 0
    assert "needs Python 3.11, 3.12 or 3.13 but python3 is Python 3.9.2" in run.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_script_is_sound():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


# --------------------------------------------------------------------------------------------------- house rules


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 600
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is {node.end_lineno - node.lineno + 1} lines"


@pytest.mark.parametrize("path", [p for p in SOURCES if "tests" not in p.parts], ids=lambda p: str(p.relative_to(ROOT)))
def test_package_code_validates_by_raising_and_is_documented(path):
    tree = ast.parse(path.read_text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert ast.get_docstring(tree)


def test_vllm_is_imported_in_its_own_room_only():
    for path in SOURCES:
        if "vllm" in path.parts or "tests" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "vllm" for name in names), path


def test_no_machine_path_in_tracked_files():
    # Assembled so that this file does not match itself.
    pattern = re.compile("(?:^|[^A-Za-z0-9_.])/(?:" + "|".join(["work", "root", "home", "tmp"]) + ")/[A-Za-z0-9_.]+")
    for file in tracked_files():
        if file.suffix in {".png", ".pdf", ".safetensors", ".csv", ".jsonl", ".xz"}:
            continue
        found = pattern.search(file.read_text(errors="replace"))
        assert found is None, f"{file.relative_to(ROOT)}: {found[0]}"


# -------------------------------------------------------------------------------------------------------- README


README = (ROOT / "README.md").read_text() if (ROOT / "README.md").is_file() else ""


def test_readme_commands_exist():
    targets = set(re.findall(r"(?:^|`)make ([a-z][a-z0-9_-]*)", README, re.MULTILINE))
    assert {"reproduce", "test"} <= targets
    assert targets <= set(phony_targets())


def test_readme_links_and_listed_folders_exist():
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
    listing = re.search(r"```text\n(.*?)```", README, re.DOTALL)[1]
    for line in listing.splitlines():
        assert (ROOT / line.split()[0]).exists(), line


def test_generated_blocks_are_current():
    from residualquant.repro.readme import BLOCKS, DOCUMENTS, fill

    texts = [(ROOT / name).read_text() for name in DOCUMENTS]
    assert [fill(text) for text in texts] == texts
    assert set(BLOCKS) == {name for text in texts for name in re.findall(r"<!-- generated:(\w+) -->", text)}


@pytest.mark.parametrize("line", re.findall(r"\.venv/bin/residualquant (.+?)(?:`|\s+#|$)", README, re.MULTILINE))
def test_readme_commands_are_understood(line, monkeypatch):
    name, *rest = shlex.split(line)
    ran = []

    @functools.wraps(cli.COMMANDS[name])
    def record(*args, **options):
        ran.append(name)

    monkeypatch.setitem(cli.COMMANDS, name, record)
    with pytest.raises(SystemExit, match="0") if rest == ["--help"] else contextlib.nullcontext():
        cli.main([name, *rest])
    assert ran == ([] if rest == ["--help"] else [name])


def test_readme_snippets_are_python():
    for snippet in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        ast.parse(snippet)


def test_json_files_parse():
    for file in tracked_files():
        if file.suffix in {".json", ".ipynb"}:
            json.loads(file.read_text())
