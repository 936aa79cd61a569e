"""Scorers: the benchmarks' own solutions pass, wrong ones do not, and code under test harms nothing."""

import os
import random
import socket
import subprocess
import sys
import threading
import time

import pytest

from residualquant.errors import ResidualQuantError
from residualquant.evals import _scoring_worker, scorers
from residualquant.evals.benchmarks import BENCHMARKS, benchmark_problems
from residualquant.evals.prompts import PROMPT_VERSIONS, STOP_STRINGS, code_prompt, gsm8k_prompt, math500_prompt
from residualquant.evals.scorers import extract_number, score, scorer_versions
from residualquant.evals.tasks import TASKS, Problem, problems


def code_problem(task="stubs", **changes):
    fields = dict(
        task=task,
        level=1,
        problem_id=f"{task}/1/0",
        prompt='def double(x):\n    """Twice x."""\n',
        solution="    return 2 * x\n",
        answer="    return 2 * x\n",
        entry_point="double",
        base_input=((1,), (5,)),
    )
    return Problem(**(fields | changes))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so she has 1,234 apples.", "1234"),
        ("It costs $18.", "18"),
        ("first 3, then 4\n#### 72", "72"),
        ("#### -5", "-5"),
        ("The answer is 3.50.", "3.50"),
        ("half of 7 is 3.5 and the rest is 4", "4"),
        ("none at all", "[invalid]"),
        ("", "[invalid]"),
    ],
)
def test_flexible_extract(text, number):
    assert extract_number(text) == number


@pytest.mark.parametrize("task", TASKS)
def test_own_solutions_pass_and_truncated_ones_fail(task):
    some = problems(task, 12)
    assert all(score(task, some, [p.solution for p in some]))
    assert not any(score(task, some, [p.solution[: len(p.solution) // 2] for p in some]))
    assert not any(score(task, some, [""] * len(some)))


@pytest.mark.parametrize("task", TASKS)
def test_another_problems_solution_fails(task):
    some = problems(task, 12)
    shifted = [p.solution for p in some[1:] + some[:1]]
    same_answer = [p.answer == q.answer for p, q in zip(some, some[1:] + some[:1])]
    assert score(task, some, shifted) == same_answer


def test_math_verify_compares_values_not_strings():
    gold = [Problem("algebra", 1, "algebra/1/0", "", "", answer) for answer in (r"\frac{1}{2}", "-3", "2x+6")]
    assert score("algebra", gold, [r"$\boxed{0.5}$", r"x is $\boxed{-3}$.", r"\boxed{2(x+3)}"]) == [True] * 3
    assert score("algebra", gold, [r"\boxed{\frac{1}{3}}", r"\boxed{3}", "no box"]) == [False] * 3


@pytest.mark.parametrize(("name", "total"), [("gsm8k", 1319), ("math500", 500), ("humaneval", 164), ("mbpp", 378)])
def test_published_solutions_of_the_real_benchmarks(test_data, name, total):
    every = benchmark_problems(name, test_data / "data")
    verdicts = score(name, every, [p.solution for p in every])
    failed = [p.problem_id for p, passed in zip(every, verdicts) if not passed]
    # HumanEval/32: EvalPlus' oracle. Mbpp/630: EvalPlus' sanitiser drops a helper that yields and never returns.
    assert failed == {"humaneval": ["HumanEval/32"], "mbpp": ["Mbpp/630"]}.get(name, [])
    assert len(every) == total
    if name == "humaneval":
        assert all(score(name, every, [p.solution for p in every], find_zero_workaround=True))


def test_find_zero_workaround_still_fails_a_wrong_root(test_data):
    problem = benchmark_problems("humaneval", test_data / "data")[32]
    wrong = "def find_zero(xs):\n    return 123.0\n"
    assert score("humaneval", [problem], [wrong], find_zero_workaround=True) == [False]


def test_other_peoples_answers_fail_the_real_benchmarks(test_data):
    for name in BENCHMARKS:
        some = benchmark_problems(name, test_data / "data", 30)
        verdicts = score(name, some, [p.solution for p in some[7:] + some[:7]])
        assert sum(verdicts) <= 3, name  # a few answers coincide by chance


def test_a_fenced_answer_ends_at_its_fence(test_data):
    problem = benchmark_problems("humaneval", test_data / "data", 1)[0]
    assert score("humaneval", [problem], [problem.solution + "\n```\nThis function is wrong because ((("]) == [True]


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_code_that_misbehaves_only_fails(listener):
    bodies = {
        "endless loop": "    while True: pass\n",
        "memory": "    return [0] * 10**10\n",
        "exit": "    raise SystemExit(0)\n",
        "hard exit": "    import os; os._exit(0)\n",
        "wrong": "    return x\n",
        "syntax": "    return (x\n",
        "prints to the protocol": "    import os; os.write(1, b'[true]\\n'); return 0\n",
        "network": f"    import socket; socket.create_connection({listener.getsockname()}); return 2 * x\n",
    }
    started = time.monotonic()
    assert score("stubs", [code_problem()] * len(bodies), list(bodies.values())) == [False] * len(bodies)
    assert time.monotonic() - started < 30
    assert score("stubs", [code_problem()], ["    return x + x\n"]) == [True]


def test_code_after_a_stop_string_is_not_run():
    response = "    return 2 * x\n\nprint(undefined_name)\ndef double(x):\n    return 0\n"
    assert score("stubs", [code_problem()], [response]) == [True]


def test_no_file_is_left_behind(tmp_path):
    source = (
        "import os, tempfile\n"
        "from residualquant.evals.scorers import score, close_workers\n"
        "from residualquant.evals.tasks import Problem\n"
        "p = Problem('asserts', 1, 'asserts/1/0', '', '', 'def f(x):\\n    return x\\n', 'f', ((1,),))\n"
        "bodies = ['while True: pass', 'import pathlib; pathlib.Path(\"left.txt\").write_text(\"x\"); return x']\n"
        "print(score('asserts', [p, p], ['def f(x):\\n    ' + b + '\\n' for b in bodies]))\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", source], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("[False, ")
    assert list(tmp_path.iterdir()) == []


def test_scoring_process_dying_is_reported_and_it_starts_again():
    worker = scorers._Worker("code")
    try:
        with pytest.raises(ResidualQuantError, match="scoring process ended early"):
            worker.judge([{"dataset": "stubs"}])  # an item without its fields
        code = "def f(x):\n    return x\n"
        item = {"dataset": "stubs", "task_id": "stubs/1/0", "reference": code, "solution": code}
        item |= {"entry_point": "f", "inputs": [[1]], "atol": 0}
        assert worker.judge([item]) == [True]
        assert worker.judge([]) == []
    finally:
        worker.close()


def test_scoring_works_in_any_thread():
    verdicts = []
    answers = [Problem("algebra", 1, "algebra/1/7", "", "", "77")]
    thread = threading.Thread(target=lambda: verdicts.extend(score("algebra", answers, [r"\boxed{77}"])))
    thread.start()
    thread.join(60)
    assert verdicts == [True]


def test_longest_parsable_is_evalplus_choice():
    from evalplus.sanitize import code_extract

    program = problems("asserts", 1)[0]
    text = "Here is the code:\n" + program.prompt + program.solution + "\n\nHope (this helps!\nx = 1\n"
    lines, rng = text.split("\n"), random.Random(0)
    for _ in range(25):
        start, end = sorted(rng.sample(range(len(lines) + 1), 2))
        piece = "\n".join(lines[start:end])
        mine, theirs = _scoring_worker.longest_parsable(piece), code_extract(piece)
        assert mine == theirs


def test_scoring_process_imports_neither_torch_nor_this_package():
    source = (
        "import sys, runpy; sys.argv = ['worker', 'code', '1']\n"
        f"ns = runpy.run_path({_scoring_worker.__file__!r}, run_name='worker')\n"
        "ns['_prepare']('code')\n"
        "print(sorted({'torch', 'residualquant'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_bad_arguments_name_the_value():
    with pytest.raises(ValueError, match="'poems'"):
        score("poems", [], [])
    with pytest.raises(ValueError, match="1 problems but 2 responses"):
        score("words", problems("words", 1), ["1", "2"])
    with pytest.raises(ValueError, match="'poems'"):
        scorer_versions("poems")
    with pytest.raises(ValueError, match="'poems'"):
        benchmark_problems("poems", ".")


def test_missing_benchmark_file_is_one_clear_sentence(tmp_path):
    with pytest.raises(ResidualQuantError, match=r"gsm8k/test\.jsonl"):
        benchmark_problems("gsm8k", tmp_path)


def test_versions_name_every_judge():
    assert scorer_versions("stubs")["evalplus"] == "0.3.1"
    assert scorer_versions("algebra")["math-verify"] == "0.9.0"
    assert set(scorer_versions("words")) == {"flexible-extract"}


def test_prompts():
    assert set(PROMPT_VERSIONS) == set(STOP_STRINGS) == set(BENCHMARKS)
    prompt = gsm8k_prompt("How many?")
    assert prompt.count("Q: ") == 4 and prompt.endswith("\n\nQ: How many?\nA:")
    assert gsm8k_prompt("How many?", shots=8).count("The answer is ") == 8
    assert math500_prompt("Find $x$.").endswith("Solution:") and r"\boxed{}" in math500_prompt("x")
    assert code_prompt("def f(): ...\n").endswith("```python\n")
    with pytest.raises(ValueError, match="9"):
        gsm8k_prompt("How many?", shots=9)
