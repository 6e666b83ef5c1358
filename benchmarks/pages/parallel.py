"""What control costs several processes: docs/results/parallel.md."""

from __future__ import annotations

from pages.layout import Results, origin, table_head, table_row


def parallel(results: Results) -> str:
    """docs/results/parallel.md"""
    record = results.read("parallel-cpu.json")
    figures = {figure["name"].strip(): figure for figure in record["figures"]}
    text = [
        "# What control costs several processes",
        "",
        "`gnmr bench parallel` with gloo: steps with control and without it take turns in every process, each of them",
        "with a micro-batch of its own. *Control* is norms, packing, signal, policy and switching, without the one sum",
        "over ranks; *its sum* that sum in the rank that came last, no waiting; *waiting* the mean of all ranks.",
        "Shares of a step without control, medians; the ratio is of whole steps, with its 95 % interval, and holds",
        "clipping and the count of saved bytes too.",
        "",
        *table_head(
            ["processes", "a step without, ms", "control", "its sum", "the sum and waiting", "step over step without"]
        ),
    ]
    for of in ("1 process", "2 processes", "4 processes"):
        names = (f"control, {of}", f"its sum over ranks, {of}", f"the same with waiting, {of}")
        shares = [f"{figures[name]['value']:.2%}" if name in figures else "-" for name in names]
        ratio = figures[f"step with control over step without, {of}"]
        step = f"{1000 * figures[f'step without, {of}']['value']:.0f}"
        text.append(
            table_row([of[0], step, *shares, f"{ratio['value']:.3f}x ({ratio['low']:.3f} to {ratio['high']:.3f})"])
        )
    text += ["", "The sum of a controller alone, of units with one number each, ms:", ""]
    text += table_head(["units", "bytes", "2 processes", "4 processes"])
    for units in ("28", "1,000", "10,000"):
        found = [figures[f"sum of {units} units, {size} processes"] for size in (2, 4)]
        sent = found[0]["note"].split(" bytes")[0]
        text.append(table_row([units, sent, *(f"{figure['value']:.2f}" for figure in found)]))
    load = record["machine"]["load_average"][0]
    text += [
        "",
        f"On {record['machine']['cores']} cores with a load of {load:.0f} beside it: what waits says as much of the",
    ]
    text += ["machine as of the code.", ""]
    return "\n".join([*text, *origin([record])])
