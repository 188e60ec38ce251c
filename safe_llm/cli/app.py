"""The commands: parse, check, hand over. What is slow to import is imported when a command needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from safe_llm.cli.bench_options import BenchFlags
from safe_llm.cli.eval_options import EvaluationFlags
from safe_llm.cli.options import (
    EnsembleFlags,
    MemberFlags,
    OutputFlags,
    PlacementFlags,
    SamplingFlags,
    with_flags,
)
from safe_llm.cli.server_options import ServerFlags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safe_llm.config import EnsembleSpec

__all__ = ["app"]


class SectionedCommand(TyperCommand):
    """A command whose help shows the flags in sections, as plain text (rich's help costs a fifth of a second)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section per panel, in the order of the parameters."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            is_argument = param.param_type_name == "argument"
            title = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
            if (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class ListCommand(SectionedCommand):
    """A command without arguments, whose flags that may be repeated take several values in a row too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the flag before every further value: `--batch 1 4` is `--batch 1 --batch 4`."""
        lists = {name for param in self.get_params(ctx) if getattr(param, "multiple", False) for name in param.opts}
        repeated: list[str] = []
        flag, values = "", 0
        for arg in args:
            if arg.startswith("-"):
                flag, equals, _ = arg.partition("=")
                values = len(equals)
            elif flag in lists:
                repeated += [flag] if values else []
                values += 1
            repeated.append(arg)
        return list(super().parse_args(ctx, repeated))


class HelpfulGroup(TyperGroup):
    """A group that shows its help when no command is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take no arguments as `--help`."""
        return list(super().parse_args(ctx, args or ["--help"]))


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
app = typer.Typer(
    cls=HelpfulGroup,
    context_settings=_SETTINGS,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Several language models with different tokenizers write one answer together (SAFE).",
)
models_app = typer.Typer(cls=HelpfulGroup, rich_markup_mode=None, help="List, fetch and remove models.")
app.add_typer(models_app, name="models")

Escape = Annotated[
    bool, typer.Option("--escape", help=r"Interpret \n, \t, \\ ... in text arguments and --stop; never in stdin.")
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before the conversation.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from safe_llm._version import __version__

        typer.echo(f"safe-llm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that need no command."""


@app.command(cls=SectionedCommand)
@with_flags
def generate(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT|-", help="The prompt, or - for stdin.")] = None,
    *,
    members: MemberFlags,
    placement: PlacementFlags,
    ensemble: EnsembleFlags,
    sampling: SamplingFlags,
    output: OutputFlags,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue PROMPT as plain text, without chat templates.")] = False,
    escape: Escape = False,
) -> int:
    r"""Answer one prompt.

    PROMPT is one user message, taken literally (--escape interprets \n and the like; a PROMPT that begins with a dash
    goes after --). With - the bytes of stdin are the prompt, unchanged. Into a pipe goes exactly the answer, without a
    newline of ours; on a terminal a newline ends it and control characters are shown as escapes.
    """
    from safe_llm.cli import answering, loading, prompts

    answering.check_output(output)
    if escape:
        system, sampling = _unescaped(system, sampling)
    text = prompts.read_text(prompt, escape=escape)
    spec = loading.spec_of(members, placement, ensemble, sampling)
    request = prompts.build_prompt(text, system=system, raw=raw)
    answering.check_trace(output)
    loaded = loading.load_ensemble(spec, progress=not output.quiet)
    with answering.tracing(loaded, output) as trace:
        answering.answer(loaded, request, spec.sampling, output, trace=trace)
    return 0


@app.command(cls=SectionedCommand)
@with_flags
def chat(
    members: MemberFlags,
    placement: PlacementFlags,
    ensemble: EnsembleFlags,
    sampling: SamplingFlags,
    output: OutputFlags,
    system: System = None,
    escape: Escape = False,
) -> int:
    """Talk, turn by turn.

    /reset starts over, /exit or Ctrl-D ends. Ctrl-C stops an answer, whose text so far stays in the conversation; at
    the prompt it ends the program. From a pipe each line is a turn, and a newline follows each answer.
    """
    from safe_llm.cli import answering, chat, loading

    answering.check_output(output)
    if escape:
        system, sampling = _unescaped(system, sampling)
    spec = loading.spec_of(members, placement, ensemble, sampling)
    answering.check_trace(output)
    loaded = loading.load_ensemble(spec, progress=not output.quiet)
    with answering.tracing(loaded, output) as trace:
        return chat.converse(loaded, spec.sampling, output, system, trace)


def _unescaped(system: str | None, sampling: SamplingFlags) -> tuple[str | None, SamplingFlags]:
    from dataclasses import replace

    from safe_llm.cli.prompts import unescape

    stop = None if sampling.stop is None else [unescape(text) for text in sampling.stop]
    return None if system is None else unescape(system), replace(sampling, stop=stop)


@app.command(cls=SectionedCommand)
@with_flags
def inspect(
    text: Annotated[str | None, typer.Argument(metavar="TEXT|-", help="The text, or - for stdin.")] = None,
    *,
    members: MemberFlags,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Show too how each member reads TEXT as a user message.")
    ] = False,
    system: System = None,
    escape: Escape = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> int:
    """Show how each member reads a text.

    Tokens as of generated text, the boundaries that all members share, what a member cannot represent, how far the
    vocabularies overlap, END tokens, context windows and fallbacks. Reads tokenizers only, no weights.
    """
    from safe_llm.cli import inspection, inspection_view, loading, prompts

    content = prompts.read_text(text, escape=escape)
    conversation = prompts.build_prompt(content, system=system, raw=False) if as_chat or system is not None else None
    spec = loading.members_spec(members)
    report = inspection.inspect_text(content, _load_readers(spec, progress=not quiet), conversation)
    inspection_view.print_json(report) if as_json else inspection_view.print_report(report)
    return 0


def _load_readers(spec: EnsembleSpec, *, progress: bool) -> Sequence[Any]:
    from safe_llm.cli import inspection, terminal

    with terminal.waiting("reading tokenizers", shown=progress):
        return [inspection.Reader.load(member, progress=progress) for member in spec.members]


@app.command(cls=SectionedCommand)
@with_flags
def advise(
    *,
    member: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="A model to compare: demo name, folder, .gguf file or hub id; repeat it."),
    ] = None,
    data: Annotated[str, typer.Option(metavar="FILE", help="Labelled items, JSON Lines.")],
    task: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="How the items are asked and scored. [default: as the file fits]"),
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text to compare tokenizers on. [default: the items' own]")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most items, the first ones. [default: all]")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Limit of an answer. [default: the task's]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    placement: PlacementFlags,
) -> int:
    """Find out which of several models should draft, which should verify, and how.

    Every model answers the labelled items alone, and every pair is compared: tokens, boundaries and agreement. The
    recommendation says why, and what the items are too few to tell.
    """
    from safe_llm.cli import advising

    question = advising.Question(
        members=member or (),
        placement=placement,
        data=data,
        task=task,
        text=text,
        limit=limit,
        max_tokens=max_tokens,
    )
    return advising.advise(question, as_json=as_json, progress=not quiet)


@models_app.command("list", cls=SectionedCommand)
def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> int:
    """List the demo models and what else is in the cache, with licences."""
    from safe_llm.cli import model_commands

    return model_commands.show_models(as_json=as_json)


@models_app.command("fetch", cls=SectionedCommand)
def fetch_command(
    name: Annotated[str, typer.Argument(metavar="PRESET|MODEL", help="A preset, or one model.")],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> int:
    """Download and convert a preset's models, or one model, for later use."""
    from safe_llm.cli import model_commands

    return model_commands.fetch(name, progress=not quiet)


@models_app.command("rm", cls=SectionedCommand)
def remove_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `models list` shows it.")],
) -> int:
    """Delete a model from the cache."""
    from safe_llm.cli import model_commands

    return model_commands.remove(name)


@app.command(cls=SectionedCommand)
def report(
    traces: Annotated[list[str], typer.Argument(metavar="TRACE...", help="Files that `--trace` wrote.")],
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page instead.")
    ] = None,
) -> int:
    """Show where the ensemble acted in answers, and why.

    On the terminal: the text with its tokens marked, the ensemble points, counters and times. With --html a page that
    opens in any browser without a network, where each token shows what every member made of it.
    """
    from safe_llm.cli import reporting

    return reporting.report(traces, html)


@app.command("eval", cls=SectionedCommand)
@with_flags
def evaluate(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TASK...|paper]",
            help="gsm8k, math500, bbh, arc_challenge, mmlu_redux; none takes what fits the file of --data.",
            show_default=False,
        ),
    ] = None,
    *,
    members: MemberFlags,
    placement: PlacementFlags,
    evaluation: EvaluationFlags,
) -> int:
    """Find out whether the ensemble answers better than its members.

    Each member alone, merging at every token, and SAFE answer the same questions in turns. Prints accuracies with 95 %
    intervals, and writes answers/, results.json, results.md and results.png. `paper` does it with the paper's models.
    """
    from safe_llm.cli import evaluating

    return evaluating.run(tasks or (), members, placement, evaluation)


@app.command(cls=ListCommand)
@with_flags
def bench(
    members: MemberFlags,
    placement: PlacementFlags,
    ensemble: EnsembleFlags,
    flags: BenchFlags,
) -> int:
    """Measure how fast the ensemble is, and where the time goes.

    Contenders take turns on the same prompts in this one process, so that a machine whose speed drifts is equally slow
    to all; greedy. Prints what the machine allows, medians with ratios to transformers' `generate` of the drafter (95 %
    intervals), and counts that do not depend on the machine. The last line is one JSON object with every trial.
    """
    from safe_llm.cli import benchmarking

    return benchmarking.run(members, placement, ensemble, flags)


@app.command(cls=SectionedCommand)
@with_flags
def serve(
    members: MemberFlags,
    placement: PlacementFlags,
    ensemble: EnsembleFlags,
    sampling: SamplingFlags,
    server: ServerFlags,
) -> int:
    """Answer any OpenAI client over HTTP.

    Requests join and leave the running batch between rounds. The flags of Decoding hold for requests that do not say
    otherwise. SIGTERM or Ctrl-C: nothing new is let in, and what is under way may finish.
    """
    from safe_llm.cli import serving

    return serving.run(members, placement, ensemble, sampling, server)
