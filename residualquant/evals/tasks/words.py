"""`words`: arithmetic word problems with many look-alike facts (stands for GSM8K).

Everybody owns some of one item; most sentences relate two people; the order is shuffled and some people do not
matter. The solution first traces back from the person asked about, then computes forward. Finding the right
sentence again and again is what a damaged KV cache is worst at.
"""

from __future__ import annotations

import random

from residualquant.evals.tasks.problem import Problem, ancestry, rng_for

NAMES = (
    "Ann Bob Cal Dan Eve Fay Gus Hal Ian Joy Kim Lee Max Ned Oda Pam Quin Ray Sue Tom Uma Vic Wes Xia Yan Zoe "
    "Abe Bea Cid Dot Eli Flo Gil Hana Ivo Jan Kay Lou Mia Noa"
).split()
ITEMS = "apples books coins shells stamps marbles".split()
# level: (people, steps from the first known number to the answer, largest number in a fact); the first two are
# inclusive ranges. No value exceeds 5 times the largest number (or 999).
LEVELS = {
    1: ((3, 6), (1, 3), 60),
    2: ((6, 10), (2, 5), 60),
    3: ((8, 12), (3, 7), 60),
    4: ((10, 16), (4, 9), 60),
    5: ((14, 18), (6, 10), 60),
    6: ((10, 16), (4, 9), 200),
    7: ((10, 16), (4, 9), 500),
    8: ((10, 16), (4, 9), 2000),
    9: ((12, 18), (6, 10), 2000),
    10: ((14, 18), (6, 10), 212),
}


def _relate(r: random.Random, name: str, other: str, value: int, item: str, largest: int) -> tuple[int, str, str]:
    """Value, sentence and worked step of ``name``, whose amount follows from ``other``'s ``value``."""
    limit = max(999, 5 * largest)
    kinds = ["+"] * 2 * (value < 0.9 * limit) + ["-"] * 2 * (value > 6) + ["*"] * (value <= limit // 3 - 33)
    kind = r.choice(kinds)
    if kind == "+":
        c = r.randint(1, min(largest, limit - value))
        result, text = value + c, f"{c} more {item} than {other}"
    elif kind == "-":
        c = r.randint(1, min(largest, value - 1))
        result, text = value - c, f"{c} fewer {item} than {other}"
    else:
        c = r.choice((2, 3))
        result, text = value * c, f"{c} times as many {item} as {other}"
    return result, f"{name} has {text}.", f"{name} = {value} {kind} {c} = {result}."


def make(level: int, seed: int | str) -> Problem:
    """The problem of (level, seed); same arguments, same problem."""
    r = rng_for("words", level, seed)
    (few, many), (short, long), largest = LEVELS[level]
    people = r.randint(few, many)
    depth = r.randint(short, min(people - 1, long))
    names, item = r.sample(NAMES, people), r.choice(ITEMS)
    value: dict[str, int] = {}
    parent: dict[str, str | None] = {}
    step: dict[str, str] = {}
    facts = []
    for i, name in enumerate(names):
        if i == 0 or (i > depth and r.random() < 0.4):
            value[name], parent[name] = r.randint(2, largest), None
            fact, step[name] = f"{name} has {value[name]} {item}.", f"{name} = {value[name]}."
        else:
            other = names[i - 1] if i <= depth else r.choice(names[:i])
            parent[name] = other
            value[name], fact, step[name] = _relate(r, name, other, value[other], item, largest)
        facts.append(fact)
    r.shuffle(facts)
    asked = names[depth]
    chain = ancestry(asked, parent)
    answer = str(value[asked])
    prompt = f"Question: {' '.join(facts)} How many {item} does {asked} have?\nAnswer:"
    lines = [" " + " < ".join(chain) + ".", *(step[n] for n in reversed(chain)), f"#### {answer}"]
    return Problem("words", level, f"words/{level}/{seed}", prompt, "\n".join(lines), answer)
