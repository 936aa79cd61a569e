"""`stubs` and `asserts`: list programs whose steps have made-up names (stand for HumanEval and MBPP).

A glossary gives each name its meaning among many look-alikes; the program applies several of them in order.
In `stubs` (signature, docstring, doctest) the glossary is in words; some constants are given as a sum to work out,
and some names are only other names for others. In `asserts` (sentence, assertions, whole function wanted) most
names are defined by one example, so their constant has to be worked out.
"""

from __future__ import annotations

import random

from residualquant.evals.tasks.problem import Problem, rng_for

OPERATIONS = (
    ("adds {k}", "[x + {k} for x in xs]"),
    ("subtracts {k}", "[x - {k} for x in xs]"),
    ("multiplies by {d}", "[x * {d} for x in xs]"),
    ("keeps numbers above {k}", "[x for x in xs if x > {k}]"),
    ("keeps numbers below {k}", "[x for x in xs if x < {k}]"),
    ("drops every {k}", "[x for x in xs if x != {k}]"),
    ("appends {k}", "xs + [{k}]"),
    ("puts {k} in front", "[{k}] + xs"),
    ("caps at {k}", "[min(x, {k}) for x in xs]"),
    ("negates", "[-x for x in xs]"),
    ("sorts", "sorted(xs)"),
    ("reverses", "xs[::-1]"),
)
ENDINGS = (("the list", "xs"), ("the list", "xs"), ("the sum", "sum(xs)"))
NONCE = (
    "dax wug zib fep blick toma gorp nuz kiv plim drak sorn velt quib jask murl thrib snaf glon prask "
    "ruk yelm crov bint hask wolp frin zant keld morb"
).split()
VERBS = "pack sift fold comb trim rank mold tune cast spin".split()
NOUNS = "list data nums vals row run line deck".split()
# level: (names in the glossary, names applied, difficulty of the constants); the first two are inclusive ranges
LEVELS = {
    1: ((3, 5), (1, 2), 0),
    2: ((5, 8), (2, 4), 0),
    3: ((7, 11), (3, 5), 0),
    4: ((10, 14), (4, 7), 0),
    5: ((13, 17), (6, 9), 0),
    6: ((10, 14), (4, 7), 1),
    7: ((10, 14), (4, 7), 2),
    8: ((10, 14), (4, 7), 3),
    9: ((10, 14), (4, 7), 4),
    10: ((13, 17), (6, 9), 5),
}
# by difficulty: how often a constant is given as a sum; the largest constant; largest argument and shift of an example
SUM_CHANCE = (0.0, 0.4, 0.8, 0.8, 0.1, 0.4)
LARGEST = (99, 99, 99, 400, 99, 99)
EXAMPLE_RANGE = ((40, 50), (99, 99), (200, 150), (500, 400), (240, 170), (101, 100))
Glossary = tuple[list[str], dict[str, str], dict[str, str]]


def _run(lines: list[str], ending: str, xs: list[int]):
    """Result of applying the expressions in turn (they are this module's own, never a model's)."""
    for line in lines:
        xs = eval(line, {"__builtins__": {"min": min, "sorted": sorted}}, {"xs": xs})
    return eval(ending, {"__builtins__": {"sum": sum}}, {"xs": xs})


def _inputs(r: random.Random, count: int) -> list[list[int]]:
    return [[r.randint(-60, 99) for _ in range(r.randint(3, 5))] for _ in range(count)]


def _glossary_in_words(r: random.Random, names: list[str], difficulty: int) -> Glossary:
    """Entries, expression and comment of each name; about one in five names another entry."""
    entries, code, comment = [], {}, {}
    for i, name in enumerate(names):
        if i >= 2 and r.random() < 0.2:
            other = r.choice([n for n in names[:i] if comment[n] == n])
            entries.append(f"{name}: same as {other}")
            code[name], comment[name] = code[other], f"{name} = {other}"
        else:
            words, expression = r.choice(OPERATIONS)
            k, d = r.randint(2, LARGEST[difficulty]), r.randint(2, 9)
            chance = SUM_CHANCE[difficulty]
            part = r.randint(1, k - 1) if chance and r.random() < chance else 0
            entries.append(f"{name}: {words.format(k=f'{part} + {k - part}' if part else k, d=d)}")
            code[name], comment[name] = expression.format(k=k, d=d), name
    return entries, code, comment


def _glossary_by_example(r: random.Random, names: list[str], difficulty: int) -> Glossary:
    """As above; names that shift a number are shown by one example instead of being told."""
    argument, shift = EXAMPLE_RANGE[difficulty]
    entries, code, comment = [], {}, {}
    for name in names:
        if r.random() < 0.6:
            x, k = r.randint(2, argument), r.choice([-1, 1]) * r.randint(2, shift)
            entries.append(f"{name}({x}) == {x + k}")
            code[name] = f"[x {'+' if k > 0 else '-'} {abs(k)} for x in xs]"
            comment[name] = entries[-1]
        else:
            words, expression = r.choice(OPERATIONS[2:])
            k, d = r.randint(2, LARGEST[difficulty]), r.randint(2, 9)
            entries.append(f"{name}: {words.format(k=k, d=d)}")
            code[name], comment[name] = expression.format(k=k, d=d), name
    return entries, code, comment


def _make(task: str, level: int, seed: int | str) -> Problem:
    r = rng_for(task, level, seed)
    (few, many), (short, long), difficulty = LEVELS[level]
    count = r.randint(few, many)
    names = r.sample(NONCE, count)
    used = r.sample(names, r.randint(short, min(count, long)))
    glossary = _glossary_in_words if task == "stubs" else _glossary_by_example
    entries, code, comment = glossary(r, names, difficulty)
    r.shuffle(entries)
    said, ending = r.choice(ENDINGS)
    function = f"{r.choice(VERBS)}_{r.choice(NOUNS)}"
    inputs = _inputs(r, 6)
    lines = [code[n] for n in used]
    body = "".join(f"    # {comment[n]}\n    xs = {code[n]}\n" for n in used) + f"    return {ending}\n"
    example = f"{function}({inputs[0]})"
    if task == "stubs":
        prompt = (
            f'def {function}(xs):\n    """Words: {"; ".join(entries)}.\n'
            f"    Apply {', '.join(used)} to the list. Return {said}.\n"
            f'    >>> {example}\n    {_run(lines, ending, inputs[0])}\n    """\n'
        )
        answer = body
    else:
        prompt = (
            f'"""\nWords: {"; ".join(entries)}.\n'
            f"Write a function that applies {', '.join(used)} to each list. Return {said}.\n"
            f'assert {example} == {_run(lines, ending, inputs[0])}\n"""\n'
        )
        answer = f"def {function}(xs):\n{body}"
    base = tuple((xs,) for xs in [*inputs, []])
    return Problem(task, level, f"{task}/{level}/{seed}", prompt, answer, answer, function, base)


def make_stub(level: int, seed: int | str) -> Problem:
    """The `stubs` problem of (level, seed); same arguments, same problem."""
    return _make("stubs", level, seed)


def make_assert(level: int, seed: int | str) -> Problem:
    """The `asserts` problem of (level, seed); same arguments, same problem."""
    return _make("asserts", level, seed)
