"""`gnmr export PLAN [to=TARGET,...] [out=FOLDER] [pp=N]`: write a plan for other libraries."""

from __future__ import annotations

from pathlib import Path

from gnmr.console import Terminal, print_plain
from gnmr.errors import UserError, as_user_error, printable, writing
from gnmr.lab.cli.parser import Parser, names_of, path, whole
from gnmr.options import one_of
from gnmr.plan.export import TARGETS, export
from gnmr.plan.pin_plan import read_plan
from gnmr.records import output

_TEXT = """\
PLAN is a plan.json, or the folder that holds it (gnmr diagnose ... out=FOLDER). The command lists what it wrote, and
then, for each library that cannot run the plan as it is, what differs, what that costs and why. The first lines of each
file repeat this.

  gnmr diagnose my_llama/ data=text.txt recipe=nvfp4 budget=+10% out=plan/
  gnmr export plan/
  gnmr export plan/ to=te,megatron pp=4 out=job/

targets:
"""


def main(argv: list[str]) -> int:
    """Run the command and return its exit code. Raises UserError before anything is written."""
    targets = "".join(f"  {name:13} {target.library}\n" for name, target in TARGETS.items())
    parser = Parser("export", "PLAN [to=TARGET,...] [out=FOLDER] [pp=N]", _TEXT + targets, bare=False)
    parser.option("to", names_of, "targets, with commas between; default: all that can run the plan's low recipe")
    parser.option("out", path, "folder for the files, made where there is none; default: PLAN's")
    parser.option("pp", whole(1), "pipeline stages, of equal length (megatron)", 1)
    options, place = parser.of_one_place(argv, "plan.json, or its folder")
    out = options.out or (Path(place) if Path(place).is_dir() else Path(place).parent)
    with as_user_error():
        for target in options.to or ():
            one_of(TARGETS, to=target)
    if options.pp > 1 and options.to and "megatron" not in options.to:
        raise UserError(f"pp={options.pp}: is for to=megatron alone; leave it out")
    plan, files = read_plan(place), dict[str, str]()
    exact, departures = list[str](), list[str]()
    for target in options.to or TARGETS:
        try:
            with as_user_error():
                result = export(plan, target, options.pp)
        except UserError as error:
            # By default, a target that cannot run the plan is left out with its reason.
            if options.to:
                raise
            departures.append(f"{target}: not written: {str(error).removeprefix('export: ')}")
            continue
        files |= result.files
        names = ", ".join(result.files)
        # NOT marks what the library does otherwise than the plan says. A line about other names than its own is for
        # the file alone.
        differences = [note for note in result.notes if note.startswith("NOT")]
        if not differences:
            exact.append(names)
            continue
        if any(note.startswith(("NOT as", "NOT on")) for note in differences):
            differences.append(f"what it can express: {TARGETS[target].limits}")
        departures.append(f"{target} ({names}): {'; '.join(differences)}")
    if not files:
        raise UserError(f"out={out}: nothing to write: {departures[0]}")
    with writing(f"out={out}"):
        out.mkdir(exist_ok=True)
    for name in files:  # all are checked before any is written
        output.check(out / name, f"out={out / name}")
    for name, text in files.items():
        output.write_text(out / name, text, f"out={out / name}")
    terminal = Terminal()
    print_plain(terminal, printable(f"written to {out}: {', '.join(files)}"))
    if exact:
        print_plain(terminal, printable(f"as the plan says: {', '.join(exact)}"))
    for line in departures:
        print_plain(terminal, printable(line))
    return 0
