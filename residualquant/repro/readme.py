"""Fill the generated blocks of README.md and docs/serving.md from the committed records: no number is typed by hand.

A block lies between ``<!-- generated:NAME -->`` and ``<!-- /generated:NAME -->``. Those on vLLM are made of
``data/h200``: ``vllm_speed*.json`` (:mod:`residualquant.vllm.bench`; a raw cache measured in a run of its own has its
own provenance there), ``vllm_accuracy.csv`` (:func:`residualquant.repro.serving.compare_engines`) and ``vllm.json``, a
list of checks with their protocols.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pandas as pd

from residualquant.bench.runs import COMMANDS, recorded
from residualquant.errors import ResidualQuantError
from residualquant.repro import paths
from residualquant.repro.claims import whole_claims
from residualquant.repro.cost import machine_of, model_time
from residualquant.repro.labels import FAMILIES
from residualquant.repro.layouts import markdown, summary, with_words
from residualquant.repro.profiles import PROFILES
from residualquant.repro.tables import table

COMMITTED = ("mini", "full")  # the largest last
DOCUMENTS = ("README.md", "docs/serving.md")
PUBLISHED = {"ouro": "Ouro-1.4B", "huginn": "Huginn-0125"}
SPEEDS = {"Generated": "tokens_per_second", "Prompt": "prefill_tokens_per_second"}
_BLOCK = re.compile(r"(<!-- generated:(\w+) -->\n).*?(<!-- /generated:\2 -->)", re.DOTALL)


def accuracy_block(label: str) -> str:
    """One accuracy table as the paper lays it out, of the largest profile measured; the paper's in brackets."""
    def of(profile: str) -> str:
        found = table(label, profile)
        mean = table("table2_mean", profile) if label == "table2" else None
        sizes = " to ".join(str(n) for n in sorted({found["n"].min(), found["n"].max()}))
        about = f"n = {sizes} problems a cell; 95 % intervals and paired tests in `data/{profile}/{label}.csv`."
        laid_out = summary(label, found, mean)
        shown = _in_parts(laid_out) if label == "table2" else markdown(laid_out)
        return "\n\n".join(filter(None, (about, found.attrs["note"], shown)))

    return _of_largest(of)


def _in_parts(laid_out: pd.DataFrame) -> str:
    """Table 2, too wide for a page, as the means and, folded away, the tasks of each family."""
    means = [name for name in laid_out if name.startswith("mean, ")]
    names = [name for name in laid_out if "," not in name]
    parts = [markdown(laid_out[[*names, *means]]), "<details>\n<summary><b>The tasks one by one</b></summary>"]
    for family in ("Ouro", "Huginn"):
        tasks = {name: name.removesuffix(f", {family}") for name in laid_out if name.endswith(f", {family}")}
        tasks.pop(f"mean, {family}", None)
        parts += [f"{family}-shaped:", markdown(laid_out[[*names, *tasks]].rename(columns=tasks))]
    return "\n\n".join([*parts, "</details>"])


def table1_block() -> str:
    """Table 1 as the paper lays it out, of the largest profile measured; the paper's in brackets."""
    def of(profile: str) -> str:
        rows = table("table1", profile)
        shown = [f"{ours:.2f} ({paper:.2f})" for ours, paper in zip(rows.nmse_x1000, rows.paper_nmse_x1000)]
        wide = rows.assign(shown=shown).pivot(index="loop", columns="reference", values="shown").reset_index()
        wide = wide.rename(columns={"loop": "Loop", "first": "First loop", "last": "Last loop"})
        about = f"n = {rows.n.min()} problems; 95 % intervals in `data/{profile}/table1.csv`."
        return f"{about}\n\n{markdown(wide)}"

    return _of_largest(of)


def claims_block() -> str:
    """The paper's ordering claims with their verdicts, in every profile whose records are committed."""
    columns = {}
    for profile in COMMITTED:
        whole = whole_claims(table("claims", profile))
        columns["Claim of the paper"] = [
            f"({number}) {text}" if family == "all" else f"({number}) on {family.capitalize()} alone"
            for number, text, family in zip(whole.claim, whole.text, whole.family)
        ]
        columns[f"`{profile}`"] = [_short(*row) for row in zip(whole.verdict, whole.comparisons)]
    return markdown(pd.DataFrame(columns))


def _short(verdict: str, comparisons: str) -> str:
    """ "reproduced (4 of 4)"; a claim without results says so in two words."""
    return f"{verdict} ({found})" if (found := _count(comparisons)) else verdict


def _count(comparisons: str) -> str:
    """ "4 of 4", nothing where none was measured."""
    found = re.match(r"(\d+ of \d+) comparisons reproduced", comparisons)
    return found[1] if found else ""


_JUDGED = {
    "2": "residual above direct coding of the same bits",
    "4b": "residual coding with a rotation above the rotation alone",
    "1": "residual coding alone above OptR-H alone",
    "8": "both together not worse than BF16",
}
_VERDICTS = ("reproduced", "not reproduced", "undecided", "not measured")


def conclusions_block() -> str:
    """Table 2 and the claims in a few sentences, of the largest profile measured; numbers and verdicts are read."""
    return _of_largest(_conclusions)


def _conclusions(profile: str) -> str:
    words, whole = with_words(table("table2_mean", profile)), whole_claims(table("claims", profile))
    said = []
    for family in FAMILIES:
        mean = words[words.model == family].set_index(["precision", "method"]).accuracy_pct
        if mean.isna().any():
            continue
        direct, rotated, residual, both = (
            f"{mean['INT2/4 g=32', method]:.1f} %"
            for method in ("direct", "direct + OptR-H", "residual", "residual + OptR-H")
        )
        said.append(
            f"**{family.capitalize()}-shaped, INT2/4 g=32, mean of four tasks:** {direct} with direct coding, "
            f"{rotated} with OptR-H alone, {residual} with residual coding, {both} with both; with the BF16 cache "
            f"{mean['BF16', 'BF16']:.1f} %. {_judged(whole[whole.family == family])}"
        )
    whole = whole[whole.family == "all"]
    said.append(f"**The paper's {len(whole)} claims about order:** {_listed(whole, whole.claim)}.")
    return "\n\n".join(said)


def _judged(whole: pd.DataFrame) -> str:
    """The claims of ``_JUDGED`` on one family of models, by verdict."""
    rows = whole.set_index("claim").loc[list(_JUDGED)].reset_index()
    counts = rows.comparisons.map(_count)
    text = _listed(rows, rows.claim.map(_JUDGED) + counts.map(lambda count: f" ({count})" if count else ""))
    return f"Over all precisions compared, {text}."


def _listed(rows: pd.DataFrame, names: pd.Series) -> str:
    """ "reproduced: …; not reproduced: …": ``names`` of the rows by their verdict."""
    parts = {verdict: ", ".join(names[rows.verdict == verdict]) for verdict in _VERDICTS}
    return "; ".join(f"{verdict}: {part}" for verdict, part in parts.items() if part)


def profiles_block() -> str:
    """What each profile computes, and what the models of its committed run took (a local one does not count)."""
    rows = []
    for profile in PROFILES.values():
        whole = recorded(profile.name)
        models = model_time(profile.name) if profile.name in COMMITTED else None
        seconds, machine = models or (None, machine_of(whole["provenance"]) if whole else "–")
        rows.append(
            {
                "Profile": f"`{profile.name}`",
                "Problems per cell, and cells": profile.describe(),
                "Time": _duration(whole["seconds"]) if whole else profile.cost,
                "Model time": _duration(seconds),
                "Measured on": machine,
            }
        )
    told = (
        "Model time is that of calibrating and decoding (`data/<profile>/records/timing.csv`), the processes that "
        "share a GPU one after the other, of those that share a CPU the mean."
    )
    found = pd.DataFrame(rows)
    found = found.loc[:, found.ne("–").any()]  # without the columns in which nothing was measured
    return f"{markdown(found)}\n\n{told}" if "Model time" in found else markdown(found)


def runs_block() -> str:
    """What the package's commands take, from ``data/bench/*.json``."""
    rows = [
        {
            "Command": f"`{took['command']}`",
            "Time": _duration(took["seconds"]),
            "CPU time": _duration(took["cpu_seconds"]),
            "Peak memory": _size(took["peak_mib"]),
            "Disk": _size(took["disk_mib"]),
            "Measured on": machine_of(took["provenance"]),
        }
        for took in filter(None, map(recorded, COMMANDS))
    ]
    return markdown(pd.DataFrame(rows))


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _size(mib: float) -> str:
    return f"{mib:,.1f} MiB"


def kernels_block() -> str:
    """Decode attention on one GPU beside the fastest BF16 attention there, from data/h200/kernels.csv."""
    rows = pd.read_csv(paths.data_dir("h200") / "kernels.csv")
    rows = rows[rows.reference.eq("last") & rows.context.isin((4096, 16384, 65536)) & rows.batch.isin((1, 8, 64))]
    first = rows.iloc[0]
    shape = ["model", "context", "batch"]
    shares = rows.pivot(index=shape, columns="operation", values="fraction_of_copy").map("{:.0%}".format)
    four = rows[rows.operation == "four loops"].set_index(shape).join(shares)
    shown = pd.DataFrame(
        {
            "Model": four.index.get_level_values("model"),
            "Past tokens x batch": [f"{context:,} x {batch}" for _, context, batch in four.index],
            "Residual loop, of the copy bandwidth": four["residual loop"],
            "Anchor loop": four["anchor loop"],
            "Four loops, µs": four.median_us.map("{:,.0f}".format),
            "Fastest BF16, µs": four.bf16_us.map("{:,.0f}".format),
            "which is": four.bf16_way,
            "Speed-up": four.speedup.map("{:.2f}".format),
        }
    )
    return f"{first.gpu}, {first.config}, copy bandwidth {first.copy_tb_per_s:.2f} TB/s:\n\n{markdown(shown)}"


# ------------------------------------------------------------------------------------------------ vLLM on a GPU


def speed_block() -> str:
    """Tokens that fit and speeds of a packed and of a raw cache, and what the answers are worth."""
    speeds, rows = _speeds(), []
    for name, speed in speeds.items():
        packed, raw = speed["packed"], speed.get("raw", {})
        rows.append([name, "Tokens that fit", packed["tokens_that_fit"], raw.get("tokens_that_fit")])
        for what, key in SPEEDS.items():
            for row, other in _points(speed):
                about = f"{what} tokens per second, {row['tokens']:,} x {row['requests']}"
                rows.append([name, about, row[key], other.get(key)])
    columns = ["Model", "Past tokens x requests", "Packed", "BF16", "Ratio"]
    cells = [
        [model, about, f"{packed:,.0f}", f"{raw:,.0f}" if raw else "–", f"{packed / raw:.2f}" if raw else "–"]
        for model, about, packed, raw in rows
    ]
    answers = pd.read_csv(paths.data_dir("h200") / "vllm_accuracy.csv")
    judged = "; ".join(
        f"{row.task}: {row.vllm_correct} by vLLM and {row.torch_correct} by the torch engine of {row.n}, "
        f"{row.only_vllm} to {row.only_torch} that one alone solves, p = {row.p:.2f}"
        for row in answers.itertuples()
    )
    first = answers.iloc[0]
    said = f"Answers to the same problems ({first.model}, {first.config}, McNemar's exact test): {judged}."
    head = f"{_gpu()}, vLLM {first.vllm}, the models' shapes with random weights, {_config()}"
    if not any(speed["protocol"]["compiled"] for speed in speeds.values()):
        head += ", without torch.compile"
    for name, speed in speeds.items():
        if made := speed.get("raw", {}).get("provenance"):
            said += f" {name}'s BF16 column is of another run, on {made['date'][:10]}, commit {made['commit']}."
    return f"{head} (–: not measured):\n\n{markdown(pd.DataFrame(cells, columns=columns))}\n\n{said}"


def choice_block() -> str:
    """Which cache serves which load sooner, by the measured speeds of prompts and of answers."""
    speed = _speeds()[PUBLISHED["ouro"]]
    rows = []
    for packed, raw in _points(speed):
        ratios = {f"{what} tokens": packed[key] / raw[key] for what, key in SPEEDS.items()}
        longer = packed["tokens"] * (1 / packed[SPEEDS["Prompt"]] - 1 / raw[SPEEDS["Prompt"]])
        gained = 1 / raw[SPEEDS["Generated"]] - 1 / packed[SPEEDS["Generated"]]
        load = {"Prompt tokens x requests": f"{packed['tokens']:,} x {packed['requests']}"}
        shown = {name: f"{ratio:.2f}" for name, ratio in ratios.items()}
        sooner = f"{longer / gained:.0f} answer tokens" if gained > 0 else "–"
        rows.append(load | shown | {"Packed is sooner from": sooner})
    fit = speed["packed"]["tokens_that_fit"] / speed["raw"]["tokens_that_fit"]
    options = speed["protocol"]["options"]
    model = PUBLISHED[speed["protocol"]["model"]]
    command = (
        f'residualquant serve MODEL --config "{_config("preset")}" --rotation {_config("rotation")} -- '
        f"--max-num-seqs {options['max_num_seqs']} --max-num-batched-tokens {options['max_num_batched_tokens']} "
        f"--gpu-memory-utilization {options['gpu_memory_utilization']}"
    )
    return (
        f"```sh\n{command}\n```\n\nholds {fit:.2f} times the tokens of BF16 ({_gpu()}, {model}'s shape). Speeds over "
        "those of BF16, and the length of answers from which packed is sooner, a prompt and its answer being timed one "
        f"after the other:\n\n{markdown(pd.DataFrame(rows))}\n\n"
        "So: packed where memory bounds the requests at a time or the prefix cache, and where answers are longer than "
        "that; raw (`--config BF16`) for long prompts with short answers that share no prefix."
    )


def checks_block() -> str:
    """Every check on the GPU with its result."""
    record = _record()
    rows = [{"Check": c["name"], "Result": _result(c), "Commit": c["commit"]} for c in record["checks"]]
    notes = "\n".join(f"- {c['name']}: {c['note']}." for c in record["checks"] if "note" in c)
    missing = "; ".join(record["not_measured"])
    return f"{record['gpu']}:\n\n{markdown(pd.DataFrame(rows))}\n\n{notes}\n\nNot measured: {missing}."


def _result(check: Mapping[str, Any]) -> str:
    """The result of one check in words."""
    if "answers" in check:
        found = check["answers"]
        agree, each, difference = (
            found["tokens_that_agree"], found["tokens_each"], found.get("largest_log_probability_difference")
        )  # fmt: skip
        whole = sum(count == each for count in agree)
        what = f"{whole} of {len(agree)} answers alike, {each} tokens each"
        if whole < len(agree):
            what += f"; the others for {', '.join(str(count) for count in agree if count < each)} tokens"
        return what if difference is None else f"{what}; log-probabilities differ by {difference:.2g}"
    if "largest_relative_error" in check:
        errors = (f"{name} {error:.2g}" for name, error in check["largest_relative_error"].items())
        return f"largest relative error: {', '.join(errors)} ({check['calls']} calls)"
    if "tests" in check:
        return f"{check['tests']['passed']} passed, {len(check['tests']['failed'])} failed"
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in check["counts"].items())


def _record() -> dict:
    return paths.parse_json((paths.data_dir("h200") / "vllm.json").read_bytes())


def _gpu() -> str:
    return _record()["gpu"]


def _speeds() -> dict[str, dict]:
    """The record of every model's shape."""
    found = (paths.parse_json(p.read_bytes()) for p in sorted(paths.data_dir("h200").glob("vllm_speed*.json")))
    return {PUBLISHED[speed["protocol"]["model"]]: speed for speed in found}


def _config(name: str | None = None) -> str:
    """The packed cache's configuration in words, or one name of it."""
    speed = next(iter(_speeds().values()))
    config = speed["protocol"]["config"]
    return config[name] if name else f"{config['preset']}, {config['rotation']}"


def _points(speed: Mapping[str, Any]) -> list[tuple[dict, dict]]:
    """What was measured of a packed and of a raw cache with the same prompts; nothing for raw where it is missing."""
    raw = {(row["tokens"], row["requests"]): row for row in speed.get("raw", {}).get("rows", ())}
    return [(row, raw.get((row["tokens"], row["requests"]), {})) for row in speed["packed"]["rows"]]


def _of_largest(make: Callable[[str], str]) -> str:
    """What ``make`` gives for the largest profile that is measured; a sentence where none is."""
    for profile in reversed(COMMITTED):
        try:
            return f"Profile `{profile}`:\n\n{make(profile)}"
        except ResidualQuantError:
            continue
    return f"Not measured yet in `{COMMITTED[-1]}`: `make reproduce PROFILE={COMMITTED[-1]}` does it."


BLOCKS: dict[str, Callable[[], str]] = {
    **{label: partial(accuracy_block, label) for label in ("table2", "table3", "table4", "table5", "table8")},
    "table1": table1_block,
    "conclusions": conclusions_block,
    "claims": claims_block,
    "profiles": profiles_block,
    "runs": runs_block,
    "kernels": kernels_block,
    "serving": speed_block,
    "serving_choice": choice_block,
    "serving_checks": checks_block,
}


def fill(text: str) -> str:
    """``text`` with the content of every generated block made anew.

    Raises:
        ResidualQuantError: a block nobody makes, or its records are missing.
    """

    def replace(match: re.Match) -> str:
        if match[2] not in BLOCKS:
            raise ResidualQuantError(f"there is no generated block {match[2]!r}; known: {', '.join(BLOCKS)}")
        return f"{match[1]}\n{BLOCKS[match[2]]().strip()}\n\n{match[3]}"

    return _BLOCK.sub(replace, text)


def main() -> None:
    """Rewrite the documents in the workspace."""
    for name in DOCUMENTS:
        path = paths.workspace() / name
        changed = paths.write_atomic(path, fill(path.read_text()))
        print(f"{name} {'rewritten' if changed else 'was current'}")


if __name__ == "__main__":
    main()
