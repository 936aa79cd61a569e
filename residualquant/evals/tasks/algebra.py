"""`algebra`: chains of linear definitions hidden among look-alikes, answered in a box (stands for MATH500).

Two dozen letters are defined from one another; the question asks for one of them, or for a fraction of two. The
solution names the letters it needs, from the one asked about back to a known number, and then computes forward.
"""

from __future__ import annotations

import random

from residualquant.evals.tasks.problem import Problem, rng_for

LETTERS = "abcdefghkmnpqrstuvwxyzABCDEFGHKMNPQRSTUVWXYZ"
LIMIT = 400
# level: (letters defined, steps from the first known number to the answer), both inclusive ranges
LEVELS = {1: ((3, 6), (1, 3)), 2: ((6, 10), (2, 5)), 3: ((8, 12), (3, 6)), 4: ((10, 16), (4, 8)), 5: ((14, 18), (6, 9))}


def _term(factor: int, letter: str) -> str:
    return {1: "", -1: "-"}.get(factor, str(factor)) + letter


def _signed(c: int) -> str:
    return f"- {-c}" if c < 0 else f"+ {c}"


def _define(r: random.Random, name: str, other: str, value: int) -> tuple[int, str, str]:
    """Value, definition and worked step of ``name`` as a linear function of ``other``."""
    factors = [1, 1, -1] + [2, 3, -2] * (abs(value) <= 120)
    factor = r.choice(factors)
    product = factor * value
    c = r.choice([-1, 1]) * r.randint(1, 50)
    if abs(product + c) > LIMIT:
        c = -c
    result = product + c
    shown = f"({value})" if value < 0 else str(value)
    lead = "" if factor == 1 else f"{factor} * {shown} = {product}; "
    step = f"{name}: {lead}{product} {_signed(c)} = {result}"
    return result, f"${name} = {_term(factor, other)} {_signed(c)}$", step


def make(level: int, seed: int | str) -> Problem:
    """The problem of (level, seed); same arguments, same problem."""
    r = rng_for("algebra", level, seed)
    (few, many), (short, long) = LEVELS[level]
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
            value[name], text, step[name] = _define(r, name, other, value[other])
        definitions.append(text)
    r.shuffle(definitions)
    asked = names[depth]
    chain, name = [], asked
    while name is not None:
        chain.append(name)
        name = parent[name]
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
