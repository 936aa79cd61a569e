"""The separate process in which EvalPlus runs code and Math-Verify compares answers.

Why a process of its own: EvalPlus caps the address space at 4 GiB, which kills a process that holds CUDA without a
word; Math-Verify's timeouts work only in a main thread; and what a model wrote must not run beside the model.
The file is started by path, so that neither this package nor torch is imported here.

Protocol: one JSON list of items per line on stdin, one JSON list of verdicts per line on stdout, until stdin closes.
A code item: {dataset, task_id, reference, solution, entry_point, inputs, atol, find_zero_workaround}.
An answer item: {gold, response}.
"""

import ast
import json
import logging
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache

# EvalPlus tries every range of lines for the longest piece that parses: cubic, so no more lines than this.
MAX_LINES = 200

# EvalPlus 0.3.1 never counts HumanEval/32 as passed: its special oracle leaves `details` unset. This states the same
# criterion, |poly(x)| <= atol, as an ordinary comparison with 0.
_FIND_ZERO_CHECK = """

def _find_zero_residual(xs):
    x = find_zero(xs)
    return float(sum(c * x**i for i, c in enumerate(xs)))
"""


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def longest_parsable(text: str) -> str:
    """The piece EvalPlus' `code_extract` picks (most non-blank lines, then the first), found by trying long ones first.

    Returns the first line when no range of two or more lines parses, as EvalPlus does.
    """
    lines = text.split("\n")[:MAX_LINES]
    filled = [0]
    for line in lines:
        filled.append(filled[-1] + bool(line.strip()))
    ranges = [(i, j) for i in range(len(lines)) for j in range(i + 1, len(lines)) if filled[j + 1] > filled[i]]
    ranges.sort(key=lambda ij: (filled[ij[0]] - filled[ij[1] + 1], ij))
    for i, j in ranges:
        piece = "\n".join(lines[i : j + 1])
        if _parses(piece):
            return piece
    return lines[0]


@lru_cache(maxsize=4096)
def _expected(dataset: str, reference: str, entry_point: str, inputs: str) -> tuple[list, list, list]:
    """Inputs, outputs and seconds of the reference solution, by EvalPlus' `trusted_exec`."""
    from evalplus.data.mbpp import mbpp_deserialize_inputs
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
    from evalplus.gen.util import trusted_exec

    arguments = json.loads(inputs)
    if dataset.startswith("mbpp:"):
        arguments = mbpp_deserialize_inputs(dataset.removeprefix("mbpp:"), arguments)
    not_none = dataset.startswith("mbpp:") and entry_point in MBPP_OUTPUT_NOT_NONE_TASKS
    outputs, seconds = trusted_exec(reference, arguments, entry_point, record_time=True, output_not_none=not_none)
    return arguments, outputs, seconds


def check_code(item: dict) -> bool:
    """Whether the sanitised solution passes every base input, executed by EvalPlus' `untrusted_check`."""
    from evalplus.eval import PASS, untrusted_check
    from evalplus.sanitize import sanitize

    dataset, entry_point = item["dataset"], item["entry_point"]
    keyed = f"mbpp:{item['task_id']}" if dataset == "mbpp" else dataset
    inputs, outputs, seconds = _expected(keyed, item["reference"], entry_point, json.dumps(item["inputs"]))
    code = sanitize(item["solution"], entry_point)
    if item.get("find_zero_workaround") and entry_point == "find_zero":
        code, entry_point, outputs = code + _FIND_ZERO_CHECK, "_find_zero_residual", [0.0] * len(inputs)
    status, _ = untrusted_check(
        dataset, code, inputs, entry_point, expected=outputs, atol=item["atol"], ref_time=seconds, fast_check=True
    )
    return status == PASS


def check_answer(item: dict) -> bool:
    """Whether Math-Verify finds the response equal to the gold answer, which is wrapped in $...$ and parsed first."""
    from math_verify import parse, verify

    gold = parse(f"${item['gold']}$")
    return bool(gold) and bool(verify(gold, parse(item["response"])))


def _refuse_network(*_args, **_kwargs):
    raise OSError("scoring never uses the network")


def _prepare(kind: str) -> Callable[[dict], bool]:
    """Import what this kind needs before the pool forks, and switch off what must not happen while scoring."""
    socket.socket.connect = _refuse_network
    socket.socket.connect_ex = _refuse_network
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    if kind == "answer":
        import math_verify  # noqa: F401

        return check_answer
    import evalplus.eval
    import evalplus.gen.util
    import evalplus.sanitize

    evalplus.sanitize.code_extract = longest_parsable
    return check_code


def main() -> None:
    multiprocessing.set_start_method("fork")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that EvalPlus or the code under test prints can reach the protocol
    check, processes = _prepare(sys.argv[1]), int(sys.argv[2])
    with ProcessPoolExecutor(processes) as pool:
        for line in sys.stdin:
            items = json.loads(line)
            verdicts = list(pool.map(check, items, chunksize=max(1, len(items) // (8 * processes))))
            print(json.dumps(verdicts), file=replies, flush=True)


if __name__ == "__main__":
    main()
