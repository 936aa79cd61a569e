"""The procedural tasks: deterministic, split by prompt, and their own solutions are right."""

from __future__ import annotations

import re

import pytest

from residualquant.evals.tasks import (
    EOS_ID,
    FROZEN,
    MODELS,
    TASKS,
    frozen,
    is_test_prompt,
    make_problem,
    problems,
)
from residualquant.models.loading import model_folder


@pytest.mark.parametrize("task", TASKS)
def test_problem_is_a_function_of_task_level_and_seed(task):
    for level in (1, *{frozen(task, family).level for family in FROZEN}):
        assert make_problem(task, level, 7) == make_problem(task, level, 7)
        assert make_problem(task, level, 7) != make_problem(task, level, 8)


@pytest.mark.parametrize("task", TASKS)
def test_splits_share_no_prompt(task):
    test, train = problems(task, 20), problems(task, 20, split="train")
    assert all(is_test_prompt(p.prompt) for p in test) and not any(is_test_prompt(p.prompt) for p in train)
    assert problems(task, 5, start=10) == test[10:15]


@pytest.mark.parametrize("task", ["words", "algebra"])
def test_every_step_of_a_worked_solution_is_true(task):
    for seed in range(50):
        problem = make_problem(task, frozen(task, "ouro").level, seed)
        steps = re.findall(r"(-?\d+) ([-+*]) \(?(-?\d+)\)? = (-?\d+)", problem.solution)
        assert steps
        for a, op, b, result in steps:
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op] == int(result)


@pytest.mark.parametrize("task", ["stubs", "asserts"])
def test_code_prompts_state_what_the_canonical_solution_returns(task):
    for seed in range(50):
        problem = make_problem(task, frozen(task, "ouro").level, seed)
        scope: dict = {}
        exec((problem.prompt if task == "stubs" else "") + problem.answer, scope)
        call, _, wanted = re.search(r"(?:>>> |assert )(.*?\))(\n    | == )(.*)", problem.prompt).groups()
        assert eval(call, scope) == eval(wanted)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", FROZEN)
def test_solutions_fit_the_token_limit(task, family):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder(MODELS[family][task]) / "tokenizer.json"))
    for problem in problems(task, 100, family=family):
        ids = tokenizer.encode(problem.solution).ids
        assert len(ids) < frozen(task, family).max_new_tokens and EOS_ID not in ids
        assert (
            tokenizer.decode(tokenizer.encode(problem.prompt + problem.solution).ids)
            == problem.prompt + problem.solution
        )


@pytest.mark.parametrize("arguments", [("sums", 1, 0), ("words", 0, 0), ("words", 99, 0)])
def test_unknown_task_or_level_is_named(arguments):
    with pytest.raises(ValueError, match=f"unknown .*{arguments[0] if arguments[0] == 'sums' else arguments[1]}"):
        make_problem(*arguments)


def test_a_level_belongs_to_a_task_and_a_family():
    assert problems("words", 2, family="huginn")[0].level == FROZEN["huginn"]["words"].level
    assert problems("words", 2) == problems("words", 2, family="ouro")
    with pytest.raises(ValueError, match="family 'llama'; known: ouro, huginn"):
        problems("words", 1, family="llama")
    with pytest.raises(ValueError, match="unknown task 'sums'"):
        frozen("sums", "ouro")


def test_bad_split_and_counts_are_refused():
    with pytest.raises(ValueError, match="'dev'"):
        problems("words", 1, split="dev")
    with pytest.raises(ValueError, match="-1"):
        problems("words", -1)
