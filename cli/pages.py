"""Pages of docs/ that are generated from declarations: docs/flags.md, and the table of sampling parameters in docs/requests.md.

`python -m penstock.cli.pages` in a checkout writes both.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from penstock.engine.options import Group, Option
from penstock.engine.sampling.params import Parameter, SamplingParams, parameters_of
from penstock.engine.text.streaming import RepetitionDetection
from penstock.serving.options import OPTIONS
from penstock.serving.requests import GenerationFields
from penstock.serving.vllm_arguments import ALL as VLLM_ARGUMENTS
from penstock.serving.vllm_arguments import WITHOUT_EFFECT, filled, flag_shown

DOCS = Path(__file__).parents[1] / "docs"
INTRODUCTION = """\
# Flags

Every flag of the server. In the library, flags not marked *server* are keyword arguments of `LLM` and `AsyncLLM`, in snake case:
`--max-num-seqs 8` is `max_num_seqs=8`. A [pooling](pooling.md) model refuses flags marked *generation*, except for values without effect.
[vLLM's flags](#vllms-flags) that are missing here are accepted if they request what Penstock does anyway; each of the others is refused
with its replacement.

Each flag may also be set by an environment variable, `PENSTOCK_` and its name in capitals: `--max-num-seqs` is `PENSTOCK_MAX_NUM_SEQS`.
All of them may be in a file, named by `--config FILE` (`PENSTOCK_CONFIG`): see [configuration](configuration.md).
"""
CPUS = """\
## CPUs, containers and NUMA

A model on the CPU gets one thread per physical core of the process's affinity (`taskset`, a cpuset), but no more than the CPU quota of
its cgroup and the parent cgroups allows (Docker's option `cpus`, `resources.limits.cpu` in Kubernetes). A quota of 2.5 CPUs gives two
threads. CPU shares and requests are not limits. `$OMP_NUM_THREADS` or `--threads` sets another number, also for OpenMP's and the
tokenizer's threads.

`--pin-threads auto` pins threads only if there are 8 or more and no quota is below the number of CPUs. With two servers on one machine,
give each its own CPUs (`taskset -c 0-31 penstock ...`, or a cpuset), or use `--pin-threads off`.

On a machine with several NUMA nodes, threads run on one node if it has a core for each. Weights and the KV cache are then allocated
there; otherwise their pages are interleaved over the nodes in use. In a container this requires the system calls `mbind` and
`set_mempolicy`, which Docker's default seccomp profile refuses unless the capability `SYS_NICE` is added; a refusal is logged. A policy
set at start, such as by `numactl -i all penstock ...`, is kept.
"""
VLLM = """\
## vLLM's flags

Flags of `vllm serve`, and arguments of vLLM's `LLM`, that are not flags here. They are written as in Python; on the command line they
have dashes, as in `gpu-memory-utilization`. The accepted values request what Penstock does anyway, or stand for one of its flags.

| vLLM's argument | accepted | otherwise |
|---|---|---|
"""
MAX_VALUE = 20  # characters of a value of vLLM's that is shown
# Around the table in docs/requests.md.
BEGIN = "<!-- sampling parameters: written by `python -m penstock.cli.pages` -->\n"
END = "<!-- end of the sampling parameters -->\n"


def flags_page() -> str:
    """docs/flags.md."""
    return "\n".join(_flag_lines())


def _flag_lines() -> Iterator[str]:
    yield INTRODUCTION
    for group in get_args(Group):
        yield f"## {group[0].upper()}{group[1:]}\n"
        yield "| flag | meaning | for |"
        yield "|---|---|---|"
        yield from (_flag_row(option) for option in OPTIONS.values() if option.group == group)
        yield ""
    yield CPUS
    yield VLLM + "\n".join(_vllm_rows()) + "\n"


def _flag_row(option: Option) -> str:
    value = f" {option.values_help}" if option.values_help and not option.is_switch else ""
    spellings = [f"`{option.flag}{_escaped(value)}`", *(f"`{flag}`" for flag in option.flags[1:])]
    if option.is_switch and option.default is not False:
        spellings.append(f"`--no-{option.flag.removeprefix('--')}`")
    scopes = [word for word, holds in (("server", option.is_server_only), ("generation", option.needs_generation)) if holds]
    return f"| {', '.join(spellings)} | {_escaped(option.whole_help)} | {', '.join(scopes)} |"


def _vllm_rows() -> Iterator[str]:
    names: dict[tuple[str, str], list[str]] = {}  # by what is said of them
    for name, argument in VLLM_ARGUMENTS.items():
        accepted = [f"`{shown}`" for shown in map(json.dumps, argument.neutral) if len(shown) <= MAX_VALUE]
        accepted += [f"`{json.dumps(known)}`: `{flag_shown(ours, str(value))}`" for known, ours, value in argument.meanings]
        hint = "no effect" if argument is WITHOUT_EFFECT else filled(argument.hint, flag_shown)
        names.setdefault((", ".join(accepted), hint), []).append(f"`{name}`")
    for (values, hint), alike in names.items():
        yield f"| {', '.join(alike)} | {_escaped(values)} | {_escaped(hint)} |"


def sampling_table() -> str:
    """The sampling parameters that both endpoints take."""
    rows = (each for name, each in parameters_of(SamplingParams).items() if name in GenerationFields.__struct_fields__)
    lines = ["| field | value | default | meaning |", "|---|---|---|---|", *map(_parameter_row, rows)]
    return "\n".join(lines) + "\n"


def _parameter_row(declared: Parameter) -> str:
    value = int(declared.default) if declared.kind is float else declared.default  # every such default is a whole number
    default = "" if value in (None, (), {}) else f"`{json.dumps(value)}`"
    if declared.generation_config:
        default = ", else ".join(filter(None, ("the model's", default)))
    meaning = declared.meaning + ("" if declared.has_beam_search else "; not with beam search")
    return f"| `{declared.name}` | {_value(declared)} | {default} | {_escaped(meaning)} |"


def _value(declared: Parameter) -> str:
    if declared.kind is bool:
        return "`true` or `false`"
    rule = declared.range_rule.removeprefix("made of ")
    if declared.kind is RepetitionDetection:
        return ", ".join(f"`{name}`" for name in RepetitionDetection.__struct_fields__)
    return "an object of numbers by token id" if rule.startswith("a dict") else rule


def _escaped(text: str) -> str:
    # For a cell of a table, which bars would end and in which tags would vanish.
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*.", "\\*.")


def with_sampling_table(page: str) -> str:
    """docs/requests.md with the table as it follows from the declarations."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{sampling_table()}\n{END}{after}"


def pages() -> dict[Path, str]:
    """The text of each file."""
    requests = DOCS / "requests.md"
    return {DOCS / "flags.md": flags_page(), requests: with_sampling_table(requests.read_text(encoding="utf-8"))}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
