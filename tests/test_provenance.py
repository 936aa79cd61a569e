"""What a hash of the code sees, and what it does not."""

from __future__ import annotations

from residualquant.repro.provenance import hash_sources

CODE = (
    '"""Module."""\n\nimport os  # comment\n\n\ndef f(x):\n    """Doc\n    string."""\n    return f"{x}#kept"  # gone\n'
)


def _hash(tmp_path, text: str) -> str:
    file = tmp_path / "module.py"
    file.write_text(text)
    return hash_sources([file])


def test_hash_sees_code_and_not_its_wording(tmp_path):
    same = (
        CODE.replace("Module.", "Other words.").replace("# comment", "").replace("\n\n\n", "\n\n").replace("Doc", "D\n")
    )
    assert _hash(tmp_path, CODE) == _hash(tmp_path, same)
    for changed in (
        CODE.replace("#kept", "#else"),
        CODE.replace("f(x)", "f(y)"),
        CODE.replace("import os", "import io"),
    ):
        assert _hash(tmp_path, CODE) != _hash(tmp_path, changed)
