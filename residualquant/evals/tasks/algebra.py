"""`algebra`: chains of linear definitions hidden among look-alikes, answered in a box (stands for MATH500).

Two dozen letters are defined from one another; the question asks for one of them, or for a fraction of two. The
solution names the letters it needs, from the one asked about back to a known number, and then computes forward.
"""

from __future__ import annotations

import random

from residualquant.evals.tasks.problem import Problem, ancestry, rng_for

LETTERS = "abcdefghkmnpqrstuvwxyzABCDEFGHKMNPQRSTUVWXYZ"
# level: (letters defined, steps from the first known number to the answer, largest constant); the first two are
# inclusive ranges. No value exceeds 8 times the largest constant.
LEVELS = {
    1: ((3, 6), (1, 3), 50),
    2: ((6, 10), (2, 5), 50),
    3: ((8, 12), (3, 6), 50),
    4: ((10, 16), (4, 8), 50),
    5: ((14, 18), (6, 9), 50),
    6: ((10, 16), (4, 8), 99),
    7: ((10, 16), (4, 8), 200),
    8: ((10, 16), (4, 8), 500),
    9: ((12, 18), (7, 9), 500),
    10: ((12, 18), (7, 9), 105),
}


def _term(factor: int, letter: str) -> str:
    return {1: "", -1: "-"}.get(factor, str(factor)) + letter


def _signed(c: int) -> str:
    return f"- {-c}" if c < 0 else f"+ {c}"


def _define(r: random.Random, name: str, other: str, value: int, largest: int) -> tuple[int, str, str]:
    """Value, definition and worked step of ``name`` as a linear function of ``other``."""
    factors = [1, 1, -1] + [2, 3, -2] * (abs(value) <= 2.4 * largest)
    factor = r.choice(factors)
    product = factor * value
    c = r.choice([-1, 1]) * r.randint(1, largest)
    if abs(product + c) > 8 * largest:
        c = -c
    result = product + c
    shown = f"({value})" if value < 0 else str(value)
    lead = "" if factor == 1 else f"{factor} * {shown} = {product}; "
    step = f"{name}: {lead}{product} {_signed(c)} = {result}"
    return result, f"${name} = {_term(factor, other)} {_signed(c)}$", step


def make(level: int, seed: int | str) -> Problem:
    """The problem of (level, seed); same arguments, same problem."""
    r = rng_for("algebra", level, seed)
    (few, many), (short, long), largest = LEVELS[level]
    count = r.randint(few, many)
    depth = r.randint(short, min(count - 1, long))
    names = r.sample(LETTERS, count)
    value: dict[str, int] = {}
    parent: dict[str, str | None] = {}
    step: dict[str, str] = {}
    definitions, known = [], []
    for i, name in enumerate(names):
        if i == 0 or (i > depth and r.random() < 0.4):
            value[name], parent[name] = r.randint(2, 60), None
            text, step[name] = f"${name} = {value[name]}$", f"{name}: {value[name]}"
            known.append(name)
        else:
            other = names[i - 1] if i <= depth else r.choice(names[:i])
            parent[name] = other
            value[name], text, step[name] = _define(r, name, other, value[other], largest)
        definitions.append(text)
    r.shuffle(definitions)
    asked = names[depth]
    chain = ancestry(asked, parent)
    lines = [" " + " < ".join(chain), *(step[n] for n in reversed(chain))]
    if r.random() < 0.3:
        below = r.choice(known)
        question, answer = f"$\\frac{{{asked}}}{{{below}}}$", f"\\frac{{{value[asked]}}}{{{value[below]}}}"
        lines.append(step[below])
    else:
        question, answer = f"${asked}$", str(value[asked])
    prompt = f"Problem: Let {', '.join(definitions)}. Find {question}.\nSolution:"
    lines.append(f"The answer is $\\boxed{{{answer}}}$.")
    return Problem("algebra", level, f"algebra/{level}/{seed}", prompt, "\n".join(lines), answer)
